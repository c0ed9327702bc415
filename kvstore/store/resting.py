"""Finds the tiers in which the blocks of a session are stored, for reports to routers.

The tiers' own answers are used, and like all of their answers the result is only a hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from kvstore.ledger.stack import TierStack
from kvstore.store.block_keys import BlockKeys
from kvstore.store.records import BlockRecord
from kvstore.store.spans import Span

# Runs of blocks in order: the first block of each, and the one after its last.
BlockRuns: TypeAlias = tuple[tuple[int, int], ...]


class Resting(msgspec.Struct, frozen=True):
    """The blocks of a session that are in memory, and those that are in slower tiers."""

    ram: BlockRuns = ()
    storage: BlockRuns = ()


class RestingBlocks:
    """Finds the blocks of sessions in the tiers. Thread-safe.

    ``has_state``: only a prefix that ends at a stored state can be used.
    """

    def __init__(self, keys: BlockKeys, stack: TierStack, *, has_state: bool) -> None:
        self._keys = keys
        self._stack = stack
        self._has_state = has_state

    def find(self, record: BlockRecord) -> Resting:
        """Find the blocks of a session. A tier that does not answer has none of them."""
        hashes = record.block_hashes
        end = self._end(record, hashes)
        spans = [x for x in self._keys.whole(hashes) if x.first_block < end]
        in_ram, slower = [False] * len(spans), [False] * len(spans)
        for level, name in enumerate(self._stack.names):
            held = in_ram if name == "ram" else slower
            rest = [i for i, there in enumerate(held) if not there]
            if rest:  # a slower tier is asked only for blobs that the faster ones lack
                found = self._stack.holds(level, [spans[i].key for i in rest])
                for i, there in zip(rest, found, strict=True):
                    held[i] = there
        return Resting(_runs(spans, in_ram, end), _runs(spans, slower, end))

    def _end(self, record: BlockRecord, hashes: Sequence[bytes]) -> int:
        """The number of blocks from which a turn could continue, if all of them are held."""
        if not self._has_state:
            return len(hashes)
        states = [self._keys.state(hashes, x) for x in record.states]
        levels = self._stack.locate([x.key for x in states]).levels
        held = [x.end_block for x, level in zip(states, levels, strict=True) if level is not None]
        return max(held, default=0)


def _runs(spans: Sequence[Span], held: Sequence[bool], end: int) -> BlockRuns:
    runs: list[tuple[int, int]] = []
    for span, there in zip(spans, held, strict=True):
        if not there:
            continue
        if runs and runs[-1][1] == span.first_block:
            runs[-1] = (runs[-1][0], min(span.end_block, end))
        else:
            runs.append((span.first_block, min(span.end_block, end)))
    return tuple(runs)
