"""Saves and loads the state of layers that do not keep all tokens.

A state is packed with the method that was measured together with the rows' codec; without such a
method it is kept exactly: a recurrent state cannot be cut back or repaired, and an error in it
affects every token that follows. Rows of windows are chunks like any others. What was restored from
a lossy copy is never packed again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engines.vllm_plugin.blocks.blocks import RestoredBlocks
from engines.vllm_plugin.blocks.host_blocks import DeviceStream
from engines.vllm_plugin.blocks.state_layers import StateBlocks
from engines.vllm_plugin.groups import IN_USE, NULL_BLOCK
from kvstore.blobs.chain import Piece
from kvstore.blobs.packer import AnyBlob
from kvstore.errors import Unusable
from kvstore.store.cold_store import ColdStore
from kvstore.store.planner import BlobRead
from kvstore.store.states import StateAt, TakenState, unpack_state

logger = logging.getLogger("thermocline.vllm")


class StatefulBlocks:
    """The states in vLLM's blocks. Thread-safe.

    A state's block ids are those of all groups that do not keep all tokens, joined; a *boundary* is
    the number of blocks before it.
    """

    def __init__(self, states: StateBlocks, store: ColdStore, stream: DeviceStream) -> None:
        self._states = states
        self._store = store
        self._stream = stream
        self._restored = RestoredBlocks()
        self._block_tokens = states.block_tokens

    def read(self, boundary: int, block_ids: Sequence[int], ready: object) -> TakenState:
        """Copy a state out of its blocks, once the device has reached the mark ``ready``."""
        with self._stream.after(ready):
            tree = self._states.read(boundary, block_ids)
        model = self._store.model
        state = StateAt(boundary * self._block_tokens, tree)
        return TakenState(state, model.windows, model.window_tokens)

    def is_restored(
        self, piece: Piece, boundary: int, block_ids: Sequence[int], hashes: Sequence[bytes]
    ) -> bool:
        """True if the state at ``boundary``, or these rows of its windows, came from a lossy copy.

        Args:
            hashes: of the session's blocks, from its beginning.
        """
        numbers = self._states.numbers(boundary)
        pairs = list(zip(block_ids, numbers, strict=True))
        if piece.is_window:
            size = self._block_tokens
            first, end = piece.first_token // size, -(-piece.end_token // size)
            rows = {x for x in self._states.window_numbers(boundary) if first <= x < end}
            pairs = [(block_id, i) for block_id, i in pairs if i in rows]
        found = [(block_id, hashes[i]) for block_id, i in pairs]
        return self._restored.has_any([x for x, _ in found], [x for _, x in found])

    def fill(
        self,
        boundary: int,
        block_ids: Sequence[int],
        blobs: Sequence[tuple[BlobRead, AnyBlob]],
        hashes: Sequence[bytes],
        ready: object,
    ) -> set[int]:
        """Fill the blocks of a state; return the ids of those filled: all, or none.

        Args:
            blobs: the state, and its windows' rows in order.
            hashes: of the session's blocks, from its beginning.
        """
        state = next(((x.piece, y) for x, y in blobs if x.piece.is_state), None)
        if state is None or NULL_BLOCK in block_ids:
            return set()
        windows = [(x, y) for x, y in blobs if x.piece.is_window]
        try:
            tree = unpack_state(self._store.packer, state, windows)
            with self._stream.after(ready):
                self._states.write(boundary, block_ids, tree)
        except Unusable as error:
            logger.warning("a verified state cannot be used: %s", error)
            self._store.discard(state[0].key)
            return set()
        self._note_restored(boundary, block_ids, blobs, hashes)
        return {*block_ids}

    def _note_restored(
        self,
        boundary: int,
        block_ids: Sequence[int],
        blobs: Sequence[tuple[BlobRead, AnyBlob]],
        hashes: Sequence[bytes],
    ) -> None:
        packer = self._store.packer
        lossy = any(packer.is_lossy(x) for read, x in blobs if not read.piece.is_chunk)
        pairs = zip(block_ids, self._states.numbers(boundary), strict=True)
        used = [(x, hashes[i]) for x, i in pairs if x != IN_USE]
        self._restored.note([x for x, _ in used], [x for _, x in used], lossy=lossy)
