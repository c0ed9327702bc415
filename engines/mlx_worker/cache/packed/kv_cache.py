"""mlx_lm's KV cache, kept packed while it is in use: one session, or a batch of them.

New tokens are appended unpacked; tokens that leave the recent window are packed, a block at a time;
reading unpacks them. Which tokens are packed depends only on the session's own length, never on the
other sessions of a batch. A batch is a list of sessions: it has no padding in memory, and joining,
leaving and reordering move no bytes.

mlx_lm finds the methods by name (``merge`` ... ``nbytes``); no base class declares them. No
attribute here may be called ``bits`` or ``group_size``: mlx_lm takes a cache with those names for
its own quantized cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import create_attention_mask

from engines.kv_budget import BLOCK, NUM_RECENT
from engines.mlx_worker.cache.packed import device_attention, host_rows
from engines.mlx_worker.cache.packed.host_rows import HostRowPacker
from engines.mlx_worker.cache.packed.rows import KVSides, PackedSide, RowPacker, empty_side
from kvstore.shapes import DType

# K and V.
KVPackers = tuple[RowPacker, RowPacker]


class Seam(Protocol):
    """States how a model attends, for its caches; see ``cache.packed_model.AttentionSeam``."""

    def is_open(self) -> bool:
        """Return whether attention calls ``attended`` of the cache after ``update_and_fetch``."""


class PackedKVCache:
    """The KV of one session in one layer; stands in for mlx_lm's ``KVCache``."""

    def __init__(self, packers: KVPackers, dtype: DType, seam: Seam | None = None) -> None:
        """``dtype``: the engine's dtype, in which attention reads K and V."""
        self.packers = packers
        self.seam = seam
        # True after a token was appended for which ``attended`` is to be called next.
        self.is_waiting = False
        self.dtype = dtype
        self.sides: KVSides | None = None  # None = no token yet
        self.offset = 0  # tokens it holds

    # ---- one layer's step

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.pack_old()
        self.append(keys, values)
        self.is_waiting = keys.shape[2] == 1 and self.attends
        if self.is_waiting:
            return keys, values
        return self.fetched(keys.dtype)

    def fetched(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Return all K and V, unpacked."""
        self.is_waiting = False
        return fetch_pair([self], [0], self.offset, dtype)

    def attended(self, queries: mx.array, scale: float) -> mx.array:
        """Return the attention of ``queries``, (1, num_heads, 1, head_dim), to all rows."""
        self.is_waiting = False
        return attend(self.packers, [self.sides], queries, scale)

    @property
    def attends(self) -> bool:
        """True if the next single token attends to packed rows.

        If the cache holds rows that cannot be packed, all rows are unpacked instead.
        """
        is_open = self.seam is not None and self.seam.is_open()
        return is_open and not any(side.num_kept for side in self.sides or ())

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add tokens; K and V are (1, num_kv_heads, num_tokens, dim) of any float dtype."""
        sides = self.sides or (
            empty_side(self.packers[0].kind, keys.shape[1]),
            empty_side(self.packers[1].kind, values.shape[1]),
        )
        self.sides = sides[0].appended(keys), sides[1].appended(values)
        self.offset += keys.shape[2]

    def pack_old(self) -> None:
        """Pack the tokens that have left the recent window.

        Call it before appending: the tokens that are here should be evaluated already, since it
        reads whether they can be packed.
        """
        if self.sides is None:
            return
        recent = int(self.sides[0].recent.shape[2])
        count = (self.offset - NUM_RECENT) // BLOCK * BLOCK - (self.offset - recent)
        if count <= 0:
            return
        (keys, odd_keys), (values, odd_values) = (
            side.packed(packer, count)
            for side, packer in zip(self.sides, self.packers, strict=True)
        )
        if mx.any(odd_keys | odd_values).item():
            old_keys, old_values = (side.recent for side in self.sides)
            keys, values = keys.keeping(old_keys, odd_keys), values.keeping(old_values, odd_values)
        self.sides = keys, values

    # ---- what mlx_lm asks of any cache

    @property
    def state(self) -> tuple[Any, ...]:
        return () if self.sides is None else (*self.sides[0].arrays, *self.sides[1].arrays)

    @state.setter
    def state(self, arrays: Sequence[Any]) -> None:
        half = len(arrays) // 2
        self.sides = (PackedSide(*arrays[:half]), PackedSide(*arrays[half:])) if arrays else None
        self.offset = self.sides[0].num_tokens if self.sides else 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(self.offset, n)
        self.offset -= n
        if self.sides is not None and n:
            self.sides = self.sides[0].trimmed(self.offset), self.sides[1].trimmed(self.offset)
        return n

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.sides is None

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.sides or ())

    def make_mask(self, N: int, **kwargs: Any) -> Any:
        return create_attention_mask(N, self.offset, **kwargs)

    def merge(self, caches: Sequence[PackedKVCache]) -> BatchPackedKVCache:
        return BatchPackedKVCache([cache.copied() for cache in caches])

    def copied(self) -> PackedKVCache:
        """Return an independent cache that shares its arrays with this one."""
        copy = PackedKVCache(self.packers, self.dtype, self.seam)
        copy.sides, copy.offset = self.sides, self.offset
        return copy


class BatchPackedKVCache:
    """The KV of several sessions in one layer; stands in for mlx_lm's ``BatchKVCache``.

    Attention sees a batch padded on the left, as mlx_lm has it: column ``c`` of row ``i`` is the
    row's token ``c - left[i]``.
    """

    def __init__(self, caches: list[PackedKVCache]) -> None:
        self.caches = caches
        self._width = max((cache.offset for cache in caches), default=0)
        self._left = [self._width - cache.offset for cache in caches]
        # While prompts padded on the right are fed: the column where each row's own tokens end, and
        # its padding on the right.
        self._ends: list[int] | None = None
        self._right: list[int] = []
        self.is_waiting = False  # as in ``PackedKVCache``

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, int32 (rows,)."""
        return mx.array([self._width - left for left in self._left], mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        num_new = keys.shape[2]
        for i, cache in enumerate(self.caches):
            cache.pack_old()
            first = min(max(self._left[i] - self._width, 0), num_new)
            last = num_new if self._ends is None else self._ends[i] - self._width
            last = min(max(last, first), num_new)
            if first < last:
                cache.append(keys[i : i + 1, :, first:last], values[i : i + 1, :, first:last])
        self._width += num_new
        self.is_waiting = num_new == 1 and any(cache.attends for cache in self.caches)
        if self.is_waiting:
            return keys, values
        return self.fetched(keys.dtype)

    def fetched(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Return all K and V, unpacked."""
        self.is_waiting = False
        return fetch_pair(self.caches, self._left, self._width, dtype)

    def attended(self, queries: mx.array, scale: float) -> mx.array:
        """Return each session's attention; ``queries`` are (sessions, num_heads, 1, head_dim)."""
        self.is_waiting = False
        packed = [i for i, cache in enumerate(self.caches) if cache.attends]
        sides = [self.caches[i].sides for i in packed]
        if len(packed) == len(self.caches):
            return attend(self.caches[0].packers, sides, queries, scale)
        found = attend(self.caches[0].packers, sides, queries[mx.array(packed)], scale)
        rows = dict(zip(packed, mx.split(found, len(packed)), strict=True))
        for i, cache in enumerate(self.caches):
            if i not in rows:  # the cache has rows that cannot be packed
                keys, values = cache.fetched(queries.dtype)
                rows[i] = mx.fast.scaled_dot_product_attention(
                    queries[i : i + 1], keys, values, scale=scale
                )
        return mx.concatenate([rows[i] for i in range(len(self.caches))])

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:
        left = mx.array(self._left)
        return create_causal_mask(N, offset=self._width, left_padding=left, **kwargs)

    # ---- prompts of different lengths

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        if left_padding is not None:
            if self._width:
                raise ValueError("padding on the left can only be added to an empty cache")
            self._left = [a + b for a, b in zip(self._left, left_padding, strict=True)]
        if right_padding is not None and lengths is not None and max(right_padding) > 0:
            self._ends = [self._width + length for length in lengths]
            self._right = list(right_padding)

    def finalize(self) -> None:
        if self._ends is not None:
            self._left = [a + b for a, b in zip(self._left, self._right, strict=True)]
            self._ends, self._right = None, []

    # ---- rows that come and go

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.caches = [self.caches[int(i)] for i in batch_indices]
        self._left = [self._left[int(i)] for i in batch_indices]
        spare = min(self._left, default=0)
        if spare > 0:
            self._width -= spare
            self._left = [left - spare for left in self._left]

    def extend(self, other: BatchPackedKVCache) -> None:
        width = max(self._width, other._width)
        self._left = [
            left + width - batch._width for batch in (self, other) for left in batch._left
        ]
        self._width = width
        self.caches = [*self.caches, *other.caches]

    def extract(self, idx: int) -> PackedKVCache:
        return self.caches[idx].copied()

    # ---- what mlx_lm asks of any cache

    @property
    def state(self) -> list[tuple[Any, ...]]:
        return [cache.state for cache in self.caches]

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(self._width, n)
        for cache in self.caches:
            cache.trim(n)
        self._width -= n
        return n

    def size(self) -> int:
        return self._width

    def empty(self) -> bool:
        return all(cache.empty() for cache in self.caches)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def attend(
    packers: KVPackers, sessions: Sequence[KVSides | None], queries: mx.array, scale: float
) -> mx.array:
    """Return the attention to packed rows, computed where they were packed: host or device."""
    are_on_host = all(isinstance(packer, HostRowPacker) for packer in packers)
    attend_there = host_rows.attend if are_on_host else device_attention.attend
    return attend_there(sessions, (packers[0].kind, packers[1].kind), queries, scale)


def fetch_pair(
    caches: Sequence[PackedKVCache], starts: Sequence[int], width: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Return K and V of all sessions unpacked, (sessions, num_kv_heads, width, dim) each.

    Session ``i`` begins at column ``starts[i]``; all other columns are zero.
    """
    sides = [cache.sides for cache in caches]
    packers, shape = caches[0].packers, (width, dtype)
    keys, values = (
        fetch(packers[k], [both[k] if both else None for both in sides], starts, *shape)
        for k in (0, 1)
    )
    return keys, values


def fetch(
    packer: RowPacker,
    sides: Sequence[PackedSide | None],
    starts: Sequence[int],
    width: int,
    dtype: mx.Dtype,
) -> mx.array:
    """Return one side (K or V) unpacked, (sessions, num_kv_heads, width, dim) of ``dtype``.

    Session ``i`` begins at column ``starts[i]``; all other columns are zero. A side is None for a
    session that has no tokens yet.
    """
    if isinstance(packer, HostRowPacker):
        return packer.fetch(sides, starts, width, dtype)
    unpacked = iter(_unpack_all(packer, [side for side in sides if side is not None]))
    held = [side for side in sides if side is not None]
    num_heads = held[0].recent.shape[1]
    batch = []
    for side, start in zip(sides, starts, strict=True):
        before = mx.zeros((1, num_heads, start, packer.kind.dim), packer.kind.dtype)
        columns = [before]
        if side is not None:
            columns += [side.sinks, side.filled(next(unpacked)), side.recent]
        after = width - sum(x.shape[2] for x in columns)
        columns.append(mx.zeros((1, num_heads, after, packer.kind.dim), packer.kind.dtype))
        filled = [x for x in columns if x.shape[2]]
        batch.append(filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=2))
    whole = batch[0] if len(batch) == 1 else mx.concatenate(batch, axis=0)
    return whole.astype(dtype)


def _unpack_all(packer: RowPacker, sides: Sequence[PackedSide]) -> list[mx.array]:
    """Return every session's packed tokens, unpacked: (1, num_kv_heads, num_packed, dim) each."""
    heads, row_nbytes = sides[0].codes.shape[1], sides[0].codes.shape[3]
    counts = [heads * side.num_packed for side in sides]
    if not sum(counts):
        return [side.sinks[:, :, :0] for side in sides]
    codes = mx.concatenate([side.codes.reshape(-1, row_nbytes) for side in sides])
    scales = mx.concatenate([side.scales.reshape(-1) for side in sides])
    unpacked = packer.unpack(codes, scales)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    bounds = zip(sides, counts, ends, strict=True)
    return [
        unpacked[end - count : end].reshape(1, heads, side.num_packed, packer.kind.dim)
        for side, count, end in bounds
    ]
