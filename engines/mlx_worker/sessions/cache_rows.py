"""The KV of one session at the end of its turn, as the cold store takes it."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.blobs.chain import Piece
from kvstore.shapes import KVRun, slice_tokens
from kvstore.store.cold_store import ColdStore
from kvstore.store.states import TakenState, pack_of_states
from kvstore.tiers.base import Blob


class CacheRows:
    """Implements ``kvstore.store.save_queue.RowSource`` with views of the engine's caches.

    Args:
        run: of all growing layers, from the first token on.
        states: of models that need them, at ends of chunks.
        restored_tokens: no row and no state after so many tokens came from a lossy copy.
    """

    def __init__(
        self, store: ColdStore, run: KVRun, states: Sequence[TakenState], restored_tokens: int
    ) -> None:
        self._store = store
        self._run = run
        self._states = states
        self._restored_tokens = restored_tokens

    def is_restored(self, piece: Piece) -> bool:
        if piece.is_state:
            return 0 < piece.first_token <= self._restored_tokens
        return piece.first_token < self._restored_tokens

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        return self._store.workers.each(self._packed, pieces)

    def release(self) -> None:
        self._run, self._states = (), ()

    def _packed(self, piece: Piece) -> Blob:
        packer = self._store.packer
        if not piece.is_chunk:
            return pack_of_states(self._states, piece, packer)
        return packer.pack_rows(piece, slice_tokens(self._run, piece.first_token, piece.end_token))
