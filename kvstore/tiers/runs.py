"""Chains of blobs as runs: blobs in a row that come and go together.

A run is one session's own part of its chain, or a part that several chains share. It grows and
shrinks at its end only, and it shrinks only while no other run continues it: so what is held of a
chain is always its beginning. The first byte of a key names the kind of blob:

* ``LINK``: a chunk. A chunk's key names its whole prefix, so its place in the tree never changes.
* ``RECORD``: a session's record. It lies in the session's last run, at most one in each, and goes
  last.
* any other: a state, say. It lies in the run beside the link before it, and is no part of chains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

LINK: Final = b"c"
RECORD: Final = b"r"
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class Run(Generic[V]):
    """Blobs in the order of their chain; without any, the memory of a run that is gone.

    ``V``: a blob, or its size where the tier keeps the blobs elsewhere.
    """

    owner: str
    first: bytes  # its first link, by which it is found again
    used_s: float
    parent: Run[V] | None = None
    gap_s: float = 0.0  # the longest between two uses lately; 0: it has never returned
    is_kept: bool = False
    is_spare: bool = False  # kept while it grew, only for what room there was
    is_shared: bool = False  # chains part at its end
    is_open: bool = False  # restored or new, and not saved since: both are one use
    is_busy: bool = False  # in the chain at hand, which never evicts its own blobs
    nbytes: int = 0
    lost: int = 0  # bytes evicted since its last use
    record: bytes = b""  # the key of the record among them; b"" = none
    keys: dict[bytes, V] = field(default_factory=dict)
    children: dict[Run[V], None] = field(default_factory=dict)  # runs that continue it

    @property
    def head(self) -> bytes:
        """Its record, or else its first blob."""
        return self.record or next(iter(self.keys))

    @property
    def last(self) -> bytes:
        """The key that goes next."""
        return next((key for key in reversed(self.keys) if key != self.record), self.record)

    @property
    def end(self) -> bytes | None:
        """Its last link."""
        return next((key for key in reversed(self.keys) if key[:1] == LINK), None)

    def line(self) -> list[Run[V]]:
        """Return the run and all before it in its chain, the first one last."""
        runs = [self]
        while (parent := runs[-1].parent) is not None:
            runs.append(parent)
        return runs


class Runs(Generic[V]):
    """The runs that are held, by key, and those whose links went lately, by the first of these."""

    def __init__(self, size_of: Callable[[bytes, V], int]) -> None:
        """``size_of``: the bytes of the budget that a key and its value take."""
        self._size_of = size_of
        self.of: dict[bytes, Run[V]] = {}
        self.gone: OrderedDict[bytes, Run[V]] = OrderedDict()

    def ending_at(self, key: bytes) -> Run[V]:
        """Return the run of a held key. A link will be the last one of its run: the rest parts."""
        run = self.of[key]
        return run if key[:1] != LINK or run.end == key else self._split(run, key)

    def _split(self, run: Run[V], end: bytes) -> Run[V]:
        """Make the part of a run up to ``end`` a run of its own."""
        head: Run[V] = Run(
            run.owner, run.first, run.used_s, run.parent, run.gap_s, run.is_kept, is_shared=True
        )
        head.is_open, head.is_busy = run.is_open, run.is_busy
        for key in list(run.keys):
            if key[:1] != RECORD:
                head.keys[key] = run.keys.pop(key)
                self.of[key] = head
            if key == end:
                break
        head.nbytes = sum(self._size_of(*x) for x in head.keys.items())
        run.nbytes -= head.nbytes
        if run.parent is not None:
            del run.parent.children[run]
            run.parent.children[head] = None
        run.parent, head.children = head, {run: None}
        run.first = next(key for key in run.keys if key[:1] == LINK)
        return head

    def next_run(self, key: bytes, owner: str, before: Run[V] | None, now_s: float) -> Run[V]:
        """Return the run that a new key belongs to: the one before it, or one that begins."""
        if before is not None:
            has_record = key[:1] == RECORD and before.record
            if not (before.is_shared or before.children or key in self.gone or has_record):
                return before
        run = self.gone.pop(key, None)
        is_before = run is not None and before is not None and run in before.line()
        if run is None or is_before or (run.keys and run.owner != owner):
            run = Run(owner, key, now_s)
        else:
            self.part(run)
        run.owner, run.parent = owner, before
        if before is not None:
            before.children[run] = None
        return run

    def append(self, run: Run[V], key: bytes, value: V) -> int:
        """Add a blob to the end of a run; return its size."""
        self.of[key] = run
        run.record = key if key[:1] == RECORD else run.record
        run.keys[key] = value
        run.nbytes += (nbytes := self._size_of(key, value))
        return nbytes

    def exchange(self, run: Run[V], key: bytes, value: V) -> int:
        """Put another value in the place of a held one; return by how much the run grew."""
        more = self._size_of(key, value) - self._size_of(key, run.keys[key])
        run.keys[key] = value
        run.nbytes += more
        return more

    def pop(self, key: bytes) -> tuple[Run[V], int]:
        """Take a blob out, the last one or one that is no link; return its run and its size."""
        run = self.of.pop(key)
        run.record = b"" if key == run.record else run.record
        nbytes = self._size_of(key, run.keys.pop(key))
        run.nbytes -= nbytes
        run.lost += nbytes
        if not run.keys and run.parent is not None:
            run.parent.children.pop(run, None)
        if (not run.keys or key == run.first) and run.first not in self.of:
            self.gone[run.first] = run  # its record may be held yet
            while len(self.gone) > len(self.of) // 8 + 64:
                self.gone.popitem(last=False)
        return run, nbytes

    def and_after(self, key: bytes) -> list[bytes]:
        """Return a held key and, if it is a link, all links that continue it; the last ones first.

        Records and states stay: they may be of use with the links before.
        """
        if key[:1] != LINK:
            return [key]
        runs = [self.of[key]]
        for run in runs:  # it grows meanwhile
            runs.extend(run.children)
        links = [x for run in reversed(runs) for x in reversed(run.keys) if x[:1] == LINK]
        return links[: links.index(key) + 1]

    def part(self, run: Run[V]) -> None:
        """Let a run stand for itself: what it continued is gone."""
        if run.parent is not None:
            run.parent.children.pop(run, None)
            run.parent = None


def links_before(keys: Iterable[bytes], after: bytes) -> dict[bytes, bytes]:
    """Return for each key of a chain the link before it; ``after``: the one before the first."""
    found: dict[bytes, bytes] = {}
    for key in keys:
        found[key] = after
        after = key if key[:1] == LINK else after
    return found


def parents_first(before: Mapping[bytes, bytes]) -> Iterator[bytes]:
    """Yield all keys, each of them later than the link before it."""
    done: set[bytes] = set()
    for key in sorted(before):  # links first
        waiting: list[bytes] = []
        while key in before and key not in done:
            waiting.append(key)
            done.add(key)
            key = before[key]
        yield from reversed(waiting)
