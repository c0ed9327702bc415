"""Separates a state from the rows of its sliding windows for the store, and joins them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.blobs.chain import WINDOW, Piece
from kvstore.blobs.packer import AnyBlob, Packer
from kvstore.blobs.state_packer import window_arrays, with_windows, without_windows
from kvstore.blobs.state_tree import StateTree
from kvstore.errors import Mismatch
from kvstore.shapes import KVLayout, KVPair, KVRun, slice_tokens, tokens_in
from kvstore.store.planner import BlobRead
from kvstore.tiers.base import Blob


class StateAt(NamedTuple):
    """A whole state, with its window rows, after exactly ``position`` tokens."""

    position: int
    tree: StateTree


class TakenState:
    """A state that is separated from its window rows and ready to be packed.

    Its arrays are views of the engine's memory.

    Args:
        windows: the layers whose rows are stored as chunks; None = none are.
        window_tokens: tokens that they keep.

    Raises:
        Mismatch: the windows have another number of rows than the store expects at this position.
    """

    def __init__(self, state: StateAt, windows: KVLayout | None, window_tokens: int) -> None:
        self.position, tree = state
        self._rest, self._run = without_windows(tree, windows)
        held = 0 if self._run is None else tokens_in(self._run)
        if windows is not None and held != min(self.position, window_tokens):
            arrays = len(window_arrays(tree))
            raise Mismatch(f"{held} rows in {arrays} window arrays after {self.position} tokens")

    def pack(self, piece: Piece, packer: Packer) -> Blob:
        """Return the blob of ``piece``: the state without its windows, or rows of its windows."""
        if piece.is_state:
            return packer.pack_state(piece, self._rest)
        assert self._run is not None
        start = self.position - tokens_in(self._run)
        rows = slice_tokens(self._run, piece.first_token - start, piece.end_token - start)
        return packer.pack_rows(piece, rows)

    def has(self, piece: Piece) -> bool:
        """Return whether ``pack`` can pack this piece."""
        if piece.is_state:
            return piece.first_token == self.position
        if not piece.is_window or self._run is None:
            return False
        return self.position - tokens_in(self._run) <= piece.first_token < self.position


def pack_of_states(states: Sequence[TakenState], piece: Piece, packer: Packer) -> Blob:
    """Return the blob of a state or of window rows, from the first of ``states`` that has them."""
    return next(x for x in states if x.has(piece)).pack(piece, packer)


def unpack_state(
    packer: Packer, state: tuple[Piece, AnyBlob], windows: Sequence[tuple[BlobRead, AnyBlob]]
) -> StateTree:
    """Return the whole state from its blob and the blobs of its window rows, in order.

    Raises:
        Unusable: a blob is damaged, not the requested one, or of an unknown codec.
    """
    piece, blob = state
    tree = packer.unpack_state(blob, piece)
    return with_windows(tree, window_run(packer, windows))


def window_run(packer: Packer, windows: Sequence[tuple[BlobRead, AnyBlob]]) -> KVRun:
    """Unpack consecutive window rows into one run, without the tokens that a read skips.

    Raises:
        Unusable: a blob is damaged, not the requested one, or of an unknown codec.
    """
    layout, counts = packer.layout_of(WINDOW), [x.piece.num_tokens - x.skip for x, _ in windows]
    out: list[KVPair] = layout.empty(sum(counts))
    at = 0
    for (read, blob), count in zip(windows, counts, strict=True):
        target = slice_tokens(out, at, at + count)
        if read.skip:
            whole = layout.empty(read.piece.num_tokens)
            packer.unpack_rows(blob, read.piece, whole)
            copy_run(slice_tokens(whole, read.skip, read.piece.num_tokens), target)
        else:
            packer.unpack_rows(blob, read.piece, target)
        at += count
    return out


def copy_run(source: KVRun, target: KVRun) -> None:
    """Copy a run into arrays of the same shapes."""
    for (from_k, from_v), (to_k, to_v) in zip(source, target, strict=True):
        to_k[...] = from_k
        to_v[...] = from_v
