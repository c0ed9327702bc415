"""Chains of blobs as a tree of runs: consecutive blobs that are kept and evicted together.

A run is the part of a chain that only one session has, or a part that several chains share. It
grows and shrinks only at its end, and it shrinks only while no other run continues it. So a tier
always holds the beginning of a chain. The first byte of a key names the kind of blob:

* ``LINK``: a chunk. Its key names its whole prefix, so its place in the tree never changes.
* ``RECORD``: a session's record. It is in the last run of the session's chain, at most one in each
  run, and is evicted after all other blobs of the run.
* any other, such as a state: it is in the run of the link before it, and no blob continues it.
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
    """Consecutive blobs of a chain; without blobs, what is remembered of an evicted run.

    ``V``: a blob, or its size if the tier keeps the blobs elsewhere.
    """

    owner: str
    first: bytes  # its first link, by which it is recognised when it returns
    used_s: float  # when it was last used
    parent: Run[V] | None = None
    gap_s: float = 0.0  # the longest time between two recent uses; 0 = it has never returned
    is_kept: bool = False  # see ``return_order``; otherwise it is on trial
    is_spare: bool = False  # kept only because there was room, not for its gap
    is_shared: bool = False  # several chains continue it
    is_open: bool = False  # new or restored, and not saved since: the save is the same use
    is_busy: bool = False  # part of the chain that is being used, which must not be evicted
    nbytes: int = 0
    lost: int = 0  # bytes evicted since its last use
    record: bytes = b""  # the key of its record; b"" = none
    keys: dict[bytes, V] = field(default_factory=dict)
    children: dict[Run[V], None] = field(default_factory=dict)  # runs that continue it

    @property
    def head(self) -> bytes:
        """The key of its record, or else of its first blob, by which it is pinned."""
        return self.record or next(iter(self.keys))

    @property
    def last(self) -> bytes:
        """The key that is evicted next."""
        return next((key for key in reversed(self.keys) if key != self.record), self.record)

    @property
    def end(self) -> bytes | None:
        """The key of its last link; None if it has none."""
        return next((key for key in reversed(self.keys) if key[:1] == LINK), None)

    def line(self) -> list[Run[V]]:
        """Return this run and all runs before it in its chain, this one first."""
        runs = [self]
        while (parent := runs[-1].parent) is not None:
            runs.append(parent)
        return runs


class Runs(Generic[V]):
    """The runs of one tier.

    Args:
        size_of: returns the bytes of the budget that a key and its value take.

    Attributes:
        of: the run of each held key.
        gone: recently evicted runs, by their first link.
    """

    def __init__(self, size_of: Callable[[bytes, V], int]) -> None:
        self._size_of = size_of
        self.of: dict[bytes, Run[V]] = {}
        self.gone: OrderedDict[bytes, Run[V]] = OrderedDict()

    def ending_at(self, key: bytes) -> Run[V]:
        """Return the run of a held key; if the key is a link, split the run after it."""
        run = self.of[key]
        return run if key[:1] != LINK or run.end == key else self._split(run, key)

    def _split(self, run: Run[V], end: bytes) -> Run[V]:
        """Split a run after the link ``end``; return the new run, which has the first part."""
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
        """Return the run for a new key: that of the key before it, a former one, or a new one.

        Args:
            before: the run of the key before it; None if the key begins a chain.
        """
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
        """Replace the value of a held key; return by how many bytes the run grew."""
        more = self._size_of(key, value) - self._size_of(key, run.keys[key])
        run.keys[key] = value
        run.nbytes += more
        return more

    def pop(self, key: bytes) -> tuple[Run[V], int]:
        """Remove a blob; return its run and its size. A link must be the last one of its run."""
        run = self.of.pop(key)
        run.record = b"" if key == run.record else run.record
        nbytes = self._size_of(key, run.keys.pop(key))
        run.nbytes -= nbytes
        run.lost += nbytes
        if not run.keys and run.parent is not None:
            run.parent.children.pop(run, None)
        if (not run.keys or key == run.first) and run.first not in self.of:
            self.gone[run.first] = run  # its record may still be held
            while len(self.gone) > len(self.of) // 8 + 64:
                self.gone.popitem(last=False)
        return run, nbytes

    def and_after(self, key: bytes) -> list[bytes]:
        """Return a held key and, if it is a link, all links that continue it, the last ones first.

        Records and states are left out, since they may be used with the links before them.
        """
        if key[:1] != LINK:
            return [key]
        runs = [self.of[key]]
        for run in runs:  # also over the children that are appended here
            runs.extend(run.children)
        links = [x for run in reversed(runs) for x in reversed(run.keys) if x[:1] == LINK]
        return links[: links.index(key) + 1]

    def part(self, run: Run[V]) -> None:
        """Detach a run from its parent, whose end was removed."""
        if run.parent is not None:
            run.parent.children.pop(run, None)
            run.parent = None


def links_before(keys: Iterable[bytes], after: bytes) -> dict[bytes, bytes]:
    """Return the link before each key of a chain.

    Args:
        after: the link before the first key; b"" = none.
    """
    found: dict[bytes, bytes] = {}
    for key in keys:
        found[key] = after
        after = key if key[:1] == LINK else after
    return found


def parents_first(before: Mapping[bytes, bytes]) -> Iterator[bytes]:
    """Yield all keys of ``before``, each after the link before it."""
    done: set[bytes] = set()
    for key in sorted(before):  # links first
        waiting: list[bytes] = []
        while key in before and key not in done:
            waiting.append(key)
            done.add(key)
            key = before[key]
        yield from reversed(waiting)
