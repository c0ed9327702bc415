"""The worker side, on arrays instead of vLLM's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.vllm_plugin.blocks.host_blocks import SPARE_BYTES, HostBlocks
from engines.vllm_plugin.blocks.stateful_blocks import StatefulBlocks
from engines.vllm_plugin.plan import Load, Save
from engines.vllm_plugin.worker.rank import StagedBlobs, StagingArea
from engines.vllm_plugin.worker.transfer import RankBlocks, Transfer
from kvstore.blobs.chain import CHUNK
from kvstore.blobs.format import codec_in
from kvstore.blobs.state_tree import StateArray, StateTree, WindowArray
from kvstore.store.restorer import Fetched
from kvstore.tiers.base import Tier
from tests.block_sessions import (
    BLOCK,
    PER_CHUNK,
    chain_of,
    fetch,
    hashes,
    open_store,
    ref,
    tokens_of,
)
from tests.unit.engines.vllm_plugin.worker.numpy_blocks import NoStream, NumpyBlocks
from tests.waiting import until

CHAIN = hashes(tokens_of(24))  # twelve chunks
IDS = list(range(30, 54))
ELSEWHERE = list(range(1, 25))


class NumpyStates:
    """Stands in for ``state_layers.StateBlocks``: a recurrent layer, and one with a window."""

    def __init__(self, window_blocks: int) -> None:
        self._window_blocks = window_blocks
        random = np.random.default_rng(7)
        self.recurrent = random.standard_normal((64, 5)).astype(np.float32)
        self.windows = [random.standard_normal((64, 2, BLOCK, 64), np.float32) for _ in "kv"]

    def places(self, boundary: int) -> list[tuple[int, bool]]:
        window = range(max(boundary - self._window_blocks, 0), boundary)
        return [(boundary - 1, False), *((i, True) for i in window)]

    def read(self, boundary: int, block_ids: Sequence[int]) -> StateTree:
        rows = [np.concatenate([x[i] for i in block_ids[1:]], axis=1) for x in self.windows]
        recurrent = StateArray("float32", self.recurrent[block_ids[:1]].copy())
        return [[recurrent], [WindowArray("float32", x[None], i) for i, x in enumerate(rows)]]

    def write(self, boundary: int, block_ids: Sequence[int], tree: StateTree) -> None:
        (recurrent,), windows = tree
        self.recurrent[block_ids[0]] = recurrent.array[0]
        for target, rows in zip(self.windows, windows, strict=True):
            for n, i in enumerate(block_ids[1:]):
                target[i] = rows.array[0][:, n * BLOCK : (n + 1) * BLOCK]

    def bits(self, block_ids: Sequence[int]) -> list[bytes]:
        rows = [x[i].tobytes() for x in self.windows for i in block_ids[1:]]
        return [self.recurrent[block_ids[0]].tobytes(), *rows]


class Rank:
    """A worker side with its store and its reports; the blocks ``IDS`` have ``CHAIN``."""

    def __init__(
        self,
        tiers: Sequence[Tier] = (),
        states: Any = None,
        spare_bytes: int = SPARE_BYTES,
        **options: Any,
    ) -> None:
        self.pages, self.tiers, self.states = NumpyBlocks(), tiers, states
        self.store = open_store(tiers, **options)
        self.staging = StagingArea()
        blocks, stateful = HostBlocks(self.pages, self.store, NoStream(), spare_bytes), None
        if states is not None:
            stateful = StatefulBlocks(states, self.store, NoStream(), BLOCK)
        self.access = RankBlocks(blocks, stateful, self.store, BLOCK)
        self.transfer = Transfer(self.access, self.staging)
        self.ended: list[tuple[int, bool]] = []  # job, and whether it was kept
        self.pages.compute(CHAIN, IDS)

    def save(
        self,
        ids: Sequence[int] = IDS,
        chain: Sequence[bytes] = CHAIN,
        states: dict[int, list[int]] | None = None,
        job: int = 1,
    ) -> None:
        self.begin(Save(job, ref(), list(chain), list(ids[: len(chain)]), states or {}))
        assert self.store.flush(120)  # the first one may compile loops

    def begin(self, save: Save) -> None:
        self.transfer.save(save, lambda save, kept: self.ended.append((save.job, kept)))

    def stage(self, chain: Sequence[bytes] = CHAIN, first: int = 0, ticket: int = 7) -> Fetched:
        """Stage the session for a load; a test may change the staged blobs."""
        self.staging.expect(ticket)
        fetched = fetch(self.store, chain, ref(), first // PER_CHUNK)
        self.staging.put(ticket, StagedBlobs(fetched, list(chain)))
        return fetched

    def load(self, first: int, ids: list[int], ticket: int = 7) -> tuple[set[str], set[int]]:
        self.transfer.load(Load(ticket, "r", first, ids))
        return self.ended_load()

    def ended_load(self) -> tuple[set[str], set[int]]:
        """The requests that are reported as loaded next, and their blocks that were not filled."""
        loads: dict[str, set[int]] = {}
        until(lambda: loads.update(self.transfer.pop_ended().loads) or bool(loads))
        return {*loads}, set().union(*loads.values())

    def restore(
        self,
        ids: Sequence[int],
        chain: Sequence[bytes] = CHAIN,
        first: int = 0,
        state_ids: Sequence[int] = (),
    ) -> int:
        """Load the chain from block ``first`` on; the number of blocks that were stored."""
        end = self.stage(chain, first).num_chunks * PER_CHUNK
        self.transfer.load(Load(7, "r", first, list(ids[first:end]), list(state_ids)))
        assert self.ended_load() == ({"r"}, set())
        return end

    def codecs_in(self, tier: int, kind: bytes = CHUNK) -> list[str]:
        """Codecs of the blobs of this kind in the RAM tier (0) or on disk (1)."""
        return sorted(codec_in(blob).decode() for _, blob in self.tiers[tier].scan(kind))

    def evict(self, *numbers: int) -> None:
        """Lose these chunks in every tier."""
        keys = [x.key for x in self.store.keys.chunks(chain_of(self.store, CHAIN))]
        for tier in self.tiers:
            tier.delete_many([keys[x] for x in numbers])

    def evict_kinds(self, *kinds: bytes) -> None:
        for tier in self.tiers:
            tier.delete_many([key for kind in kinds for key, _ in tier.scan(kind)])

    def counted(self, name: str) -> int:
        return self.store.counters.as_dict().get(name, 0)

    def close(self) -> None:
        self.transfer.close()
        self.store.close()
