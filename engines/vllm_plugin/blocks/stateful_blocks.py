"""Saves and loads the state of layers that do not keep all tokens.

A state is packed with the method that was measured together with the rows' codec. Without such a
method it is stored exactly: a recurrent state cannot be cut back or repaired, and an error in it
affects every token that follows. Rows of windows are chunks like any others. A state or row that
was restored from a lossy copy is never packed again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engines.vllm_plugin.blocks.blocks import RestoredBlocks, Stream
from engines.vllm_plugin.groups import IN_USE, NULL_BLOCK
from kvstore.blobs.chain import Piece
from kvstore.blobs.packer import AnyBlob
from kvstore.errors import ForeignCodec, Unusable
from kvstore.store.cold_store import ColdStore
from kvstore.store.planner import BlobRead
from kvstore.store.states import StateAt, TakenState, unpack_state

if TYPE_CHECKING:
    from engines.vllm_plugin.blocks.state_layers import StateBlocks

logger = logging.getLogger("thermocline.vllm")


class _StateBlock(NamedTuple):
    """A block of a state. ``is_window``: its rows are stored apart from the state."""

    id: int
    number: int  # in the session
    hash: bytes
    is_window: bool


class StatefulBlocks:
    """Reads and fills the states in vLLM's blocks. Thread-safe.

    A state's block ids are those of all groups that do not keep all tokens, group after group; its
    *boundary* is the number of blocks before it.
    """

    def __init__(
        self, states: StateBlocks, store: ColdStore, stream: Stream, block_tokens: int
    ) -> None:
        self._states = states
        self._store = store
        self._stream = stream
        self._restored = RestoredBlocks()
        self._block_tokens = block_tokens

    def read(self, boundary: int, block_ids: Sequence[int], ready: object) -> TakenState:
        """Return a copy of a state, made once the device has reached the mark ``ready``."""
        with self._stream.after(ready):
            tree = self._states.read(boundary, block_ids)
        model = self._store.model
        state = StateAt(boundary * self._block_tokens, tree)
        return TakenState(state, model.windows, model.window_tokens)

    def is_restored(
        self, piece: Piece, boundary: int, block_ids: Sequence[int], hashes: Sequence[bytes]
    ) -> bool:
        """Return whether a state, or a chunk of its windows' rows, came from a lossy copy.

        Args:
            piece: names the state or the rows.
            boundary: of the state.
            hashes: of the session's blocks, from its beginning.
        """
        size = self._block_tokens
        first, end = piece.first_token // size, -(-piece.end_token // size)
        found = [
            x
            for x in self._blocks(boundary, block_ids, hashes)
            if x.is_window == piece.is_window and (piece.is_state or first <= x.number < end)
        ]
        return self._restored.has_any([x.id for x in found], [x.hash for x in found])

    def fill(
        self,
        boundary: int,
        block_ids: Sequence[int],
        blobs: Sequence[tuple[BlobRead, AnyBlob]],
        hashes: Sequence[bytes],
        ready: object,
    ) -> set[int]:
        """Fill the blocks of a state; return the ids of those filled: all, or none.

        None are filled if the blobs hold the state of another boundary, which happens if another
        rank can restore fewer blocks.

        Args:
            blobs: of the prompt; the state and its windows' rows, in order, are used.
            hashes: of the session's blocks, from its beginning.
        """
        position = boundary * self._block_tokens
        state = next(((x.piece, y) for x, y in blobs if x.piece.is_state), None)
        if state is None or state[0].first_token != position or NULL_BLOCK in block_ids:
            return set()
        windows = [(x, y) for x, y in blobs if x.piece.is_window]
        try:
            tree = unpack_state(self._store.packer, state, windows)
            with self._stream.after(ready):
                self._states.write(boundary, block_ids, tree)
        except ForeignCodec:  # keep the blob: other servers can read it
            return set()
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
        of_state = [(read.piece, x) for read, x in blobs if not read.piece.is_chunk]
        lossy = {piece.is_window for piece, x in of_state if packer.is_lossy(x)}
        found = self._blocks(boundary, block_ids, hashes)
        for is_window in (False, True):
            used = [x for x in found if x.is_window == is_window and x.id != IN_USE]
            ids, names = [x.id for x in used], [x.hash for x in used]
            self._restored.note(ids, names, lossy=is_window in lossy)

    def _blocks(
        self, boundary: int, block_ids: Sequence[int], hashes: Sequence[bytes]
    ) -> list[_StateBlock]:
        """Return the blocks of a state, with the hashes that they have in the session."""
        apart = self._store.model.windows is not None
        found = zip(block_ids, self._states.places(boundary), strict=True)
        return [_StateBlock(x, i, hashes[i], apart and of_window) for x, (i, of_window) in found]
