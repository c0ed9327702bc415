"""The KV of one session in vLLM's blocks, as the cold store takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engines.vllm_plugin.blocks.blocks import Blocks, Packing, RestoredBlocks
from engines.vllm_plugin.blocks.stateful_blocks import StatefulBlocks
from engines.vllm_plugin.plan import Save
from kvstore.blobs.chain import Piece
from kvstore.store.cold_store import ColdStore
from kvstore.store.states import TakenState, pack_of_states
from kvstore.tiers.base import Blob


@dataclass(frozen=True)
class RankBlocks:
    """A rank's blocks, its store, and which blocks came from lossy copies."""

    blocks: Blocks
    states: StatefulBlocks | None
    store: ColdStore
    block_tokens: int
    restored: RestoredBlocks = field(default_factory=RestoredBlocks)


class BlockRows:
    """Implements ``kvstore.store.save_queue.RowSource``.

    Args:
        ready: the mark after the work that fills the blocks.
        released: called once, when the blocks are not read any more.
    """

    def __init__(
        self, save: Save, access: RankBlocks, ready: object, released: Callable[[], None]
    ) -> None:
        self._save = save
        self._access = access
        self._ready = ready
        self._released: Callable[[], None] | None = released
        self._lock = threading.Lock()

    def is_restored(self, piece: Piece) -> bool:
        if piece.is_chunk:
            first, end = self._span(piece)
            ids, hashes = self._save.block_ids[first:end], self._save.hashes[first:end]
            return self._access.restored.has_any(ids, hashes)
        states, hashes = self._access.states, self._save.hashes
        return states is not None and any(
            states.is_restored(piece, boundary, ids, hashes)
            for boundary, ids in self._states_of(piece)
        )

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        chunks = [x for x in pieces if x.is_chunk]
        rest = [x for x in pieces if not x.is_chunk]
        try:
            packing = self._access.blocks.pack([self._packing(x) for x in chunks], self._ready)
            taken = self._taken(rest)
        finally:  # always; otherwise the blocks would be held for ever
            self.release()
        packer = self._access.store.packer
        found = {x: future.result() for x, future in zip(chunks, packing, strict=True)}
        pack = self._access.store.workers.each(lambda x: pack_of_states(taken, x, packer), rest)
        found.update(zip(rest, pack, strict=True))
        return [found[x] for x in pieces]

    def release(self) -> None:
        with self._lock:
            released, self._released = self._released, None
        if released is not None:
            released()

    def _packing(self, piece: Piece) -> Packing:
        first, end = self._span(piece)
        return Packing(piece, self._save.block_ids[first:end])

    def _span(self, piece: Piece) -> tuple[int, int]:
        """The numbers of the blocks that a piece has rows of."""
        size = self._access.block_tokens
        return piece.first_token // size, -(-piece.end_token // size)

    def _states_of(self, piece: Piece) -> list[tuple[int, list[int]]]:
        """The boundaries of the states that a piece belongs to, with their block ids."""
        size, held = self._access.block_tokens, self._save.states.items()
        if piece.is_state:
            return [
                (boundary, ids) for boundary, ids in held if boundary * size == piece.first_token
            ]
        return [(boundary, ids) for boundary, ids in held if boundary * size >= piece.end_token]

    def _taken(self, pieces: Sequence[Piece]) -> list[TakenState]:
        """Copy out the states that these pieces are of."""
        states = self._access.states
        if states is None or not pieces:
            return []
        wanted = {boundary: ids for x in pieces for boundary, ids in self._states_of(x)}
        return [states.read(boundary, ids, self._ready) for boundary, ids in wanted.items()]
