"""Computes attention of one new token straight from packed rows, on any device that mlx has.

``host_rows.attend`` does the same for mlx on a CPU. Rows stay packed. The results are those of
``kvstore.codecs.rows.attention``, except for the order of additions. ``mx_packer`` rotates the
query, and rotates the sum back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.metal_packer import LANES, unit_source
from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.rows import KVSides, NeverCopied, RowKind
from kvstore.codecs.rows.attention import TOLERANCE, ReferenceAttention

logger = logging.getLogger(__name__)

MOST_QUERIES: Final = 4  # per pass over the rows: the queries, or their sums, stay in registers
SCORE_TOKENS: Final = 8  # rows per SIMD group, which reads its queries once
SUM_TOKENS: Final = 64  # rows that a SIMD group adds up; mlx adds up the groups' sums


class RowScores(Protocol):
    """Computes dot products with packed rows of one kind, and weighted sums of such rows.

    ``codes``: uint8 (heads, tokens, bytes of a row). ``scales``: uint16 (heads, tokens); a row
    whose scale is zero counts as zeros.
    """

    def scores(self, query: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        """Return fp32 (heads, queries, tokens). ``query``: fp32 (heads, queries, dim)."""

    def weighted_sums(self, weights: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        """Return fp32 (heads, queries, dim). ``weights``: fp32 (heads, queries, tokens)."""


class MlxRowScores(NeverCopied):
    """``RowScores`` by mlx operations."""

    def __init__(self, kind: RowKind) -> None:
        self._rows = MlxRowPacker(kind)

    def scores(self, query: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        levels, units = self._rows.levels_and_units(codes, scales)
        return (self.rotated(query) @ levels.swapaxes(1, 2)) * units[:, None]

    def weighted_sums(self, weights: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        levels, units = self._rows.levels_and_units(codes, scales)
        return self.rotated_back((weights * units[:, None]) @ levels)

    def rotated(self, query: mx.array) -> mx.array:
        return self._rows.rotate(self._rows.flip_signs(query))

    def rotated_back(self, sums: mx.array) -> mx.array:
        return self._rows.flip_signs(self._rows.rotate_back(sums))


class MetalRowScores(MlxRowScores):
    """``RowScores`` by Metal kernels."""

    def __init__(self, kind: RowKind) -> None:
        super().__init__(kind)
        self._kind = kind

    def scores(self, query: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        heads, tokens = scales.shape

        def of(part: mx.array) -> mx.array:
            kernel = _kernel(scores_source, self._kind, part.shape[1])
            shape, num_groups = (heads, part.shape[1], tokens), heads * -(-tokens // SCORE_TOKENS)
            return _run(kernel, num_groups, [part, codes, scales], shape)

        return _in_parts(of, self.rotated(query))

    def weighted_sums(self, weights: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
        heads, tokens = scales.shape
        blocks = -(-tokens // SUM_TOKENS)

        def of(part: mx.array) -> mx.array:
            kernel = _kernel(sums_source, self._kind, part.shape[1])
            shape = (heads, blocks, part.shape[1], self._kind.dim)
            return _run(kernel, heads * blocks, [part, codes, scales], shape).sum(axis=1)

        return self.rotated_back(_in_parts(of, weights))


def _in_parts(of: Callable[[mx.array], mx.array], whole: mx.array) -> mx.array:
    """Apply ``of`` to (heads, queries, ...), some queries at a time, and join the results."""
    firsts = range(0, whole.shape[1], MOST_QUERIES)
    found = [of(whole[:, first : first + MOST_QUERIES]) for first in firsts]
    return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)


def attend(
    sessions: Sequence[KVSides | None],
    kinds: tuple[RowKind, RowKind],
    queries: mx.array,
    scale: float,
) -> mx.array:
    """Return the attention of each session's query to its rows; see ``host_rows.attend``."""
    shape = (*queries.shape[1:3], kinds[1].dim)
    given = queries.astype(mx.float32) * scale
    found = [
        mx.zeros(shape) if sides is None else _attend_one(sides, kinds, query).reshape(shape)
        for sides, query in zip(sessions, given, strict=True)
    ]
    return mx.stack(found).astype(queries.dtype)


def _attend_one(sides: KVSides, kinds: tuple[RowKind, RowKind], query: mx.array) -> mx.array:
    """Return fp32 (num_kv_heads, queries, value_dim). ``query``: (num_heads, 1, head_dim)."""
    keys, values = sides
    exact = [mx.concatenate([x.sinks[0], x.recent[0]], axis=1).astype(mx.float32) for x in sides]
    query = query.reshape(exact[0].shape[0], -1, kinds[0].dim)
    scores = query @ exact[0].swapaxes(1, 2)
    if not keys.num_packed:
        return mx.softmax(scores, axis=2) @ exact[1]
    first, (key_rows, value_rows) = scores.shape[2], (row_scores(kind) for kind in kinds)
    packed = key_rows.scores(query, keys.codes[0], keys.scales[0])
    weights = mx.softmax(mx.concatenate([scores, packed], axis=2), axis=2)
    sums = value_rows.weighted_sums(weights[:, :, first:], values.codes[0], values.scales[0])
    return weights[:, :, :first] @ exact[1] + sums


# ---- choice


@functools.cache
def row_scores(kind: RowKind) -> RowScores:
    """Return Metal kernels if they are available and agree with numpy, else mlx operations."""
    if mx.default_device().type != mx.DeviceType.cpu and mx.metal.is_available():
        try:
            kernels = MetalRowScores(kind)
            if agrees(kernels, kind):
                return kernels
            reason = "they give other values than the definition"
        except Exception as error:  # a compiler or driver may raise any kind
            reason = f"{type(error).__name__}: {error}"
        logger.warning("no Metal kernels attend to rows of %d values: %s", kind.dim, reason)
    return MlxRowScores(kind)


def agrees(found: RowScores, kind: RowKind) -> bool:
    """Return whether scores and sums of a few sample rows equal the definition's in numpy."""
    return all(
        np.allclose(np.array(one), other, rtol=0, atol=TOLERANCE * np.abs(other).max())
        for one, other in _pairs(found, kind)
    )


def _pairs(found: RowScores, kind: RowKind) -> Iterator[tuple[mx.array, np.ndarray]]:
    reference, wave = (
        ReferenceAttention(kind.format, kind.dim),
        np.sin(np.arange(67 * kind.dim) ** 2),
    )
    codes, scales = kind.format.pack(wave.astype(np.float32).reshape(67, kind.dim)[:66])
    codes, scales = codes.reshape(2, 33, -1), scales.reshape(2, 33)
    scales[1, 3] = 0
    packed = [mx.array(codes), mx.array(scales)]
    for num_queries in (1, MOST_QUERIES + 1):
        query = wave[: 2 * num_queries * kind.dim].astype(np.float32).reshape(2, num_queries, -1)
        weights = np.abs(wave[: 66 * num_queries]).astype(np.float32).reshape(2, num_queries, 33)
        products, sums = np.empty_like(weights), np.zeros_like(query)
        reference.scores(query, codes, scales, products)
        reference.add_weighted(weights, codes, scales, sums)
        yield found.scores(mx.array(query), *packed), products
        yield found.weighted_sums(mx.array(weights), *packed), sums


# ---- Metal


@functools.cache
def _kernel(source: Callable[[RowKind, int], str], kind: RowKind, num_queries: int) -> Any:
    return mx.fast.metal_kernel(
        name=f"thermocline_{source.__name__}_{kind.num_bits}_{kind.dim}_{num_queries}",
        input_names=["given", "codes", "scales"],
        output_names=["found"],
        source=source(kind, num_queries),
    )


def _run(kernel: Any, num_groups: int, inputs: list[mx.array], shape: tuple[int, ...]) -> mx.array:
    if not num_groups:
        return mx.zeros(shape)
    found: list[mx.array] = kernel(
        inputs=[mx.contiguous(x) for x in inputs],
        grid=(num_groups * LANES, 1, 1),
        threadgroup=(min(num_groups, 4) * LANES, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.float32],
    )
    return found[0]


@functools.cache
def scores_source(kind: RowKind, num_queries: int) -> str:
    """Return the body of the kernel that computes scores; ``given`` are rotated queries."""
    values = _num_values(kind)
    value = f"given[(head * {num_queries} + q) * {kind.dim} + i * 32 + lane]"
    return f"""{_begin(kind, SCORE_TOKENS)}
    float query[{num_queries * values}];
    for (uint q = 0; q < {num_queries}; q++)
        for (uint i = 0; i < {values}; i++)
            query[q * {values} + i] = {_if_inside(kind, value)};
    for (uint token = first; token < first + {SCORE_TOKENS} && token < tokens; token++) {{
        uint row = head * tokens + token;
        float sums[{num_queries}] = {{0}};
        for (uint i = 0; i < {values}; i++) {{
{_level(kind)}
            for (uint q = 0; q < {num_queries}; q++) sums[q] += level * query[q * {values} + i];
        }}
        float unit = {unit_source(kind, "scales[row]")};
        for (uint q = 0; q < {num_queries}; q++) {{
            float total = simd_sum(sums[q]) * unit;
            if (lane == 0) found[(head * {num_queries} + q) * tokens + token] = total;
        }}
    }}
"""


@functools.cache
def sums_source(kind: RowKind, num_queries: int) -> str:
    """Return the body of the kernel that computes weighted sums; ``given`` are the weights."""
    values, dim = _num_values(kind), kind.dim
    return f"""{_begin(kind, SUM_TOKENS)}
    float sums[{num_queries * values}] = {{0}};
    for (uint token = first; token < first + {SUM_TOKENS} && token < tokens; token++) {{
        uint row = head * tokens + token;
        float unit = {unit_source(kind, "scales[row]")};
        float weights[{num_queries}];
        for (uint q = 0; q < {num_queries}; q++)
            weights[q] = given[(head * {num_queries} + q) * tokens + token] * unit;
        for (uint i = 0; i < {values}; i++) {{
{_level(kind)}
            for (uint q = 0; q < {num_queries}; q++) sums[q * {values} + i] += weights[q] * level;
        }}
    }}
    for (uint q = 0; q < {num_queries}; q++)
        for (uint i = 0; i < {values}; i++)
            if (i * 32 + lane < {dim})
                found[(group * {num_queries} + q) * {dim} + i * 32 + lane] = sums[q * {values} + i];
"""


def _num_values(kind: RowKind) -> int:
    """Return the number of a row's values per lane, rounded up."""
    return -(-kind.dim // LANES)


def _begin(kind: RowKind, num_tokens: int) -> str:
    levels = ", ".join(str(level) for level in kind.format.levels)
    return f"""
    uint group = thread_position_in_grid.x / 32;
    uint lane = thread_index_in_simdgroup;
    uint tokens = scales_shape[1];
    uint blocks = (tokens + {num_tokens - 1}) / {num_tokens};
    uint head = group / blocks, first = group % blocks * {num_tokens};
    const float levels[{len(kind.format.levels)}] = {{{levels}}};"""


def _level(kind: RowKind) -> str:
    """Return Metal source that unpacks value ``i * 32 + lane`` of a row, still rotated."""
    bits, dim = kind.num_bits, kind.dim
    place = f"row * {bits * dim // 8} + bit * {dim // 8} + i * 4 + lane / 8"
    size = f"levels[code & {(1 << (bits - 1)) - 1}u]"
    return f"""\
            uint code = 0;
            for (uint bit = 0; bit < {bits}; bit++)
                code |= ((uint({_if_inside(kind, f"codes[{place}]")}) >> (lane % 8)) & 1u) << bit;
            float level = (code >> {bits - 1}) ? -{size} : {size};"""


def _if_inside(kind: RowKind, read: str) -> str:
    return read if kind.dim % LANES == 0 else f"(i * 32 + lane < {kind.dim} ? {read} : 0)"
