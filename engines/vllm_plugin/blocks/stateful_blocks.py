"""Saves and loads the state of layers that do not keep all tokens.

A state is packed with the method that was measured together with the rows' codec; without such a
method it is kept exactly: a recurrent state cannot be cut back or repaired, and an error in it
affects every token that follows. Data that was restored from a lossy copy is never packed again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from engines.vllm_plugin.blocks.blocks import (
    NONE_BEFORE,
    Blocks,
    Filling,
    Packing,
    RestoredBlocks,
    Rows,
)
from engines.vllm_plugin.blocks.host_blocks import DeviceStream
from engines.vllm_plugin.blocks.state_layers import StateBlocks
from engines.vllm_plugin.groups import IN_USE, NULL_BLOCK
from kvstore.blobs.packer import AnyBlob
from kvstore.blobs.segments import FRESH, Lineage
from kvstore.blobs.state_tree import StateTree
from kvstore.codecs.base import Codec
from kvstore.errors import Unusable
from kvstore.store.block_store import BlockStore
from kvstore.store.records import Span
from kvstore.tiers.base import Blob

logger = logging.getLogger("thermocline.vllm")


class StatefulBlocks:
    """Implements ``blocks.Blocks``: handles states itself, and passes the rest to ``blocks``."""

    def __init__(
        self, blocks: Blocks, states: StateBlocks, store: BlockStore, stream: DeviceStream
    ) -> None:
        self._blocks = blocks
        self._states = states
        self._store = store
        self._stream = stream
        self._restored = RestoredBlocks()

    @property
    def block_bytes(self) -> int:
        return self._blocks.block_bytes  # vLLM makes blocks of all groups the same size

    @property
    def why_host(self) -> str:
        return self._blocks.why_host

    def mark(self) -> object:
        return self._blocks.mark()

    def pack(
        self, wanted: Sequence[Packing], ready: object, rows: Rows | None = None
    ) -> list[Future[Blob]]:
        states = [x for x in wanted if x.span.is_state]
        rest = [x for x in wanted if not x.span.is_state]
        packed = self._blocks.pack(rest, ready, rows)
        futures = dict(zip((x.span for x in rest), packed, strict=True))
        for x in states:
            with self._stream.after(ready):
                tree = self._states.read(x.span.end_block, x.block_ids)
            pack = partial(self._packed, x.span, tree, self._lineage(x))
            futures[x.span] = self._store.workers.codec(pack, self._store.home_codec)
            if rows is not None:
                rows[x.span] = pack
        return [futures[x.span] for x in wanted]

    def fill(self, wanted: Sequence[Filling], ready: object) -> set[int]:
        filled = self._blocks.fill([x for x in wanted if not x.span.is_state], ready)
        for x in wanted:
            if x.span.is_state and NULL_BLOCK not in x.block_ids and self._fill(x, ready):
                filled.update(x.block_ids)
        return filled

    def close(self) -> None:
        self._blocks.close()

    def _packed(self, span: Span, tree: StateTree, lineage: Lineage, codec: Codec) -> Blob:
        packer = self._store.packer
        how = packer.codecs.sessions.get(codec.id)
        return packer.pack_snapshot(
            span.key,
            tree,
            packer.layout.empty(0),
            span.end_token,
            0,
            codec=codec,
            how=how,
            lineage=lineage,
        )

    def _lineage(self, packing: Packing) -> Lineage:
        """Find the packed segments of the lossy copy that this state continues from."""
        boundary, hashes = packing.span.end_block, packing.hashes
        numbers = self._states.numbers(boundary)
        lossy_end = 0
        for block_id, i in zip(packing.block_ids, numbers, strict=True):
            if self._restored.num_lossy([block_id], hashes[i : i + 1], NONE_BEFORE, 1):
                lossy_end = max(lossy_end, i + 1)
        if not lossy_end:
            return FRESH
        span = self._store.keys.state(hashes, lossy_end)
        return Lineage(span.end_token, self._store.older.windows(span))

    def _fill(self, filling: Filling, ready: object) -> bool:
        span = filling.span
        try:
            tree = self._unpacked(span, filling.blob)
            with self._stream.after(ready):
                self._states.write(span.end_block, filling.block_ids, tree)
        except Unusable as error:
            logger.warning("a verified state cannot be used: %s", error)
            self._store.discard(span.key)
            return False
        self._note_restored(filling)
        return True

    def _note_restored(self, filling: Filling) -> None:
        lossy = self._store.packer.has_lossy_state(filling.blob)
        numbers = self._states.numbers(filling.span.end_block)
        pairs = [(x, i) for x, i in zip(filling.block_ids, numbers, strict=True) if x != IN_USE]
        names = [filling.hashes[i] for _, i in pairs]
        self._restored.note([x for x, _ in pairs], names, lossy=lossy)

    def _unpacked(self, span: Span, blob: AnyBlob) -> StateTree:
        packer = self._store.packer
        out = packer.layout.empty(0)
        return packer.unpack_snapshot(blob, span.key, span.end_token, 0, out)
