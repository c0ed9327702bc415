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


def resting_blocks(
    keys: BlockKeys, stack: TierStack, record: BlockRecord, *, has_state: bool
) -> Resting:
    """Find the blocks of a session. A tier that does not answer has none of them.

    ``has_state``: only a prefix that ends at a stored state can be used.
    """
    hashes = record.block_hashes
    end = len(hashes)
    if has_state:
        states = [keys.state(hashes, x) for x in record.states]
        levels = stack.locate([x.key for x in states]).levels
        held = [x.end_block for x, level in zip(states, levels, strict=True) if level is not None]
        end = max(held, default=0)
    spans = [x for x in keys.whole(hashes) if x.first_block < end]
    in_ram, slower = [False] * len(spans), [False] * len(spans)
    for level, name in enumerate(stack.names):
        known = in_ram if name == "ram" else slower
        rest = [i for i, there in enumerate(known) if not there]
        if rest:  # a slower tier is asked only for blobs that the faster ones lack
            found = stack.holds(level, [spans[i].key for i in rest])
            for i, there in zip(rest, found, strict=True):
                known[i] = there
    return Resting(_runs(spans, in_ram, end), _runs(spans, slower, end))


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
