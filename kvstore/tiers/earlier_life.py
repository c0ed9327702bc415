"""Blobs that an earlier life left in a tier, and the marks of their uses.

A tier that outlives the process stores the key before each blob in its chain, and a mark with the
first blob of each run: so the eviction order judges after a restart as before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvstore.tiers.runs import LINK, Run, Runs


class Mark(NamedTuple):
    """The uses of a run, as far as they decide whether it stays."""

    idle_s: float
    gap_s: float
    is_kept: bool


class Found(NamedTuple):
    """A blob of an earlier life. ``mark``: it is the first of its run."""

    nbytes: int
    after: bytes = b""
    mark: Mark | None = None


def parents_first(found: Mapping[bytes, Found]) -> Iterable[bytes]:
    """Yield all keys, each of them later than the one before it in its chain."""
    done: set[bytes] = set()
    for key in sorted(found):  # links first
        waiting: list[bytes] = []
        while key in found and key not in done:
            waiting.append(key)
            done.add(key)
            key = found[key].after
        yield from reversed(waiting)


def run_of(runs: Runs, key: bytes, blob: Found, now_s: float) -> Run:
    """Return the run that a blob belongs to; a marked one begins a run, used as its mark says."""
    before = runs.ending_at(blob.after) if blob.after in runs.of else None
    mark = blob.mark
    if before is not None and mark is not None and key[:1] == LINK:
        before.is_shared = True  # it was
    run = runs.next_run(key, "", before, before.used_s if before else now_s)
    if mark is not None and not run.keys:
        run.used_s, run.gap_s, run.is_kept = now_s - mark.idle_s, mark.gap_s, mark.is_kept
    return run


def places(keys: Iterable[bytes], after: bytes) -> dict[bytes, bytes]:
    """Return for each key of a chain the link before it; ``after``: the one before the first."""
    found: dict[bytes, bytes] = {}
    for key in keys:
        found[key] = after
        after = key if key[:1] == LINK else after
    return found
