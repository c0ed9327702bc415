"""The methods of the literature, and of the projects this one grew from, as presets.

They are for comparison: measured by the same tests and the same ``calibrate`` as our own, none is
served by default. All keep the first four tokens exact, as every codec here does. Sizes are in bits
for each element, for heads of ``D`` values and whole chunks of 128 tokens.

Methods that must know the model are in ``learned_seeds``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from kvstore.codecs.backend import best_kernel, reference_kernel
from kvstore.codecs.base import Codec
from kvstore.codecs.lloyd_max import gauss_error
from kvstore.codecs.pieces.chunk_scale import ChunkScale
from kvstore.codecs.pieces.digits import Digits
from kvstore.codecs.pieces.gain import HalfGain
from kvstore.codecs.pieces.hadamard import SignHadamard
from kvstore.codecs.pieces.half_range import HalfRange
from kvstore.codecs.pieces.lloyd import LloydMax
from kvstore.codecs.pieces.mean import ChunkMean
from kvstore.codecs.pieces.min_max import MinMaxGroups, Rounded
from kvstore.codecs.pieces.planes import BitPlanes
from kvstore.codecs.pieces.polar import Polar
from kvstore.codecs.pieces.residual import Residual
from kvstore.codecs.pieces.seams import Quantiser
from kvstore.codecs.pieces.sign import Sign
from kvstore.codecs.pieces.sketch import Sketch, SketchedResidual
from kvstore.codecs.pieces.vectors import NUM_VECTORS, ProductVectors, normal_vectors
from kvstore.codecs.pipeline import Pipeline
from kvstore.codecs.plain_rows import PlainRows
from kvstore.codecs.rotated_rows import RotatedRows
from kvstore.codecs.row_codec import RowCodec
from kvstore.codecs.stack_codec import StackCodec
from kvstore.codecs.stacks import KEY, Scope, StackShape, stack_shapes
from kvstore.shapes import KVLayout

GROUP = 32  # values that share a smallest and a step

# Heads of one width to their pipeline.
MakePipeline: TypeAlias = Callable[[StackShape], Pipeline]


@dataclass(frozen=True)
class Seed:
    """Head by head; keys and values each in their own way."""

    keys: MakePipeline
    values: MakePipeline

    def __call__(self, layout: KVLayout) -> tuple[Pipeline, ...]:
        return _assembled(self, layout)


@functools.lru_cache(maxsize=128)
def _assembled(seed: Seed, layout: KVLayout) -> tuple[Pipeline, ...]:
    return both_sides(layout, seed.keys, seed.values)


def both_sides(
    layout: KVLayout, keys_made: MakePipeline, values_made: MakePipeline
) -> tuple[Pipeline, ...]:
    """Keys and values of every width, each by their own pipeline."""
    pipelines = []
    for shape in stack_shapes(Scope("head"), layout):
        keys = tuple(unit for unit in shape.units if unit[0].side == KEY)
        values = tuple(unit for unit in shape.units if unit[0].side != KEY)
        for units, make in ((keys, keys_made), (values, values_made)):
            if units:
                pipelines.append(make(StackShape(units, shape.parts)))
    return tuple(pipelines)


def manthan() -> Codec:
    """ManthanQuant: norm as fp32, eight Lloyd-Max levels, no rotation. 3 + 32 / D bits.

    5.12x over bf16 at D = 256, as it says; also known here as ``lm3``. Its cosine of 0.983 holds
    for channels of one size. Real keys have none: perplexity +636 % on SmolLM2.
    """
    return RowCodec("manthan.1", PlainRows())


def rotated(num_bits: int) -> Codec:
    """TurboQuant-MSE (arXiv 2504.19874) of 1 to 8 bits: ``num_bits`` + 16 / D bits.

    Signs, Hadamard, Lloyd-Max, and the norm as fp16 with the norm correction that the paper lacks.
    """
    backend = best_kernel if num_bits in (3, 4) else reference_kernel
    return RowCodec(f"tq{num_bits}.1", RotatedRows(num_bits), backend)


def tqprod() -> Codec:
    """TurboQuant-prod (arXiv 2504.19874): TurboQuant-MSE of 2 bits, one sign of a sketch.

    3 + 32 / D bits: the residual has a norm too. Unbiased products, five times the error of
    spending the third bit on levels.
    """
    return StackCodec("tqprod.1", Seed(_two_bits_and_sketch, _two_bits_and_sketch))


def base11() -> Codec:
    """turboquant-mlx: eleven levels after signs and Hadamard. 3.5 + 16 / D bits at D = 64, 128.

    It packs two digits to a byte and calls that 3.5 bits: it is 4. As digits of one number, 37 to
    16 bytes, they really take 3.46.
    """
    return StackCodec("base11.1", Seed(_eleven_levels, _eleven_levels))


def rvq() -> Codec:
    """VeloxQuant's residual quantiser of one bit a stage: 2 + 16 / D bits.

    After signs and Hadamard the sign, then the sign of what it missed, which is taken to be
    Laplacian: its bit stands for the mean size of a Laplacian variable.
    """
    return StackCodec("rvq.1", Seed(_two_signs, _two_signs))


def vecinfer() -> Codec:
    """VecInfer (arXiv 2510.06175): four neighbours by one of 256 vectors, 2 + 16 / D bits.

    Keys are smoothed first, at 16 / 128 bits. The paper learns smoothing and codebook; here the
    chunk gives the one, normal vectors the other.
    """
    return StackCodec("vecinfer.1", Seed(_smoothed_vectors, _vectors))


def polar() -> Codec:
    """PolarQuant (arXiv 2502.02617): angles of 4, 2, 2, 2 bits, radius of 16: 3.875 bits."""
    return StackCodec("polar.1", Seed(_polar, _polar))


def qjl() -> Codec:
    """QJL (arXiv 2406.03482): a sketch of D signs for keys, 2-bit groups for values.

    Keys 1 + 16 / D bits, values 3 bits.
    """
    return StackCodec("qjl.1", Seed(_sketch, functools.partial(_groups, bits=2, along="width")))


def rabitq() -> Codec:
    """RaBitQ (SIGMOD 2024) for keys, TurboQuant of 4 bits for values: 2.5 + 16 / D bits.

    Keys without the chunk's mean (one cluster; 16 / 128 bits), rotated, one sign each and the
    factor that makes them fit.
    """
    return StackCodec("rabitq.1", Seed(_signs, functools.partial(_levels, num_bits=4)))


def playground() -> Codec:
    """turboQuantPlayground: rotated keys of 3 bits, values in groups of 32 with 2 bits.

    Keys 3 + 16 / D bits, values 3 bits. Its buffer of recent tokens kept as they are is this
    store's raw tail: the tokens behind the last whole chunk, 0 to 127 of them.
    """
    values = functools.partial(_groups, bits=2, along="width")
    return StackCodec("playground.1", Seed(functools.partial(_levels, num_bits=3), values))


def kivi() -> Codec:
    """KIVI (arXiv 2402.02750): groups of 32 with 2 bits, keys by channel, values by token.

    3 bits: each group has two fp16 numbers.
    """
    keys = functools.partial(_groups, bits=2, along="tokens")
    return StackCodec("kivi.1", Seed(keys, functools.partial(_groups, bits=2, along="width")))


# The table: names to import strings, as in ``presets``.
SEEDS = {
    name: f"kvstore.codecs.seeds:{name}"
    for name in (
        "manthan",
        *(f"tq{num_bits}" for num_bits in (1, 2, 5, 6, 7, 8)),
        "tqprod",
        "base11",
        "rvq",
        "vecinfer",
        "polar",
        "qjl",
        "rabitq",
        "playground",
        "kivi",
    )
}
tq1, tq2, tq5, tq6, tq7, tq8 = (
    functools.partial(rotated, num_bits) for num_bits in (1, 2, 5, 6, 7, 8)
)


def _levels(shape: StackShape, num_bits: int) -> Pipeline:
    return _rotated(shape, _lloyd(shape, 1 << num_bits), _uniform(shape, num_bits), is_fitted=True)


def _eleven_levels(shape: StackShape) -> Pipeline:
    rotation = SignHadamard(shape)
    gain = HalfGain(shape, is_fitted=False)
    return Pipeline(shape, (), gain, (rotation,), _lloyd(shape, 11), Digits(shape, 11))


def _two_bits_and_sketch(shape: StackShape) -> Pipeline:
    quantiser = SketchedResidual(_lloyd(shape, 4), 2, shape.width)
    return _rotated(shape, quantiser, quantiser.bits)


def _two_signs(shape: StackShape) -> Pipeline:
    laplacian = Sign(0.5**0.5)  # the mean size of a Laplacian variable of unit variance
    missed = gauss_error(2) ** 0.5
    return _rotated(shape, Residual(Sign(), 1, laplacian, missed), _uniform(shape, 2))


def _vectors(shape: StackShape) -> Pipeline:
    dim = 4
    bits = np.full(shape.width // dim, NUM_VECTORS.bit_length() - 1)
    return _rotated(shape, ProductVectors(normal_vectors(dim)), bits)


def _smoothed_vectors(shape: StackShape) -> Pipeline:
    return dataclasses.replace(_vectors(shape), before=(ChunkScale(shape),))


def _polar(shape: StackShape) -> Pipeline:
    rotation, quantiser = SignHadamard(shape), Polar(shape.width)
    coder = _planes(shape, quantiser.bits)
    return Pipeline(shape, (), HalfRange(shape), (rotation,), quantiser, coder)


def _sketch(shape: StackShape) -> Pipeline:
    sketch, gain = Sketch(shape.width, shape.width), HalfGain(shape, is_fitted=False)
    return Pipeline(shape, (), gain, (sketch,), Sign(1), _planes(shape, _uniform(shape, 1)))


def _signs(shape: StackShape) -> Pipeline:
    signs = _rotated(shape, Sign(), _uniform(shape, 1), is_fitted=True)
    return dataclasses.replace(signs, before=(ChunkMean(shape),))


def _groups(shape: StackShape, bits: int, along: Literal["tokens", "width"]) -> Pipeline:
    groups = MinMaxGroups(shape, bits, GROUP, along)
    coder = _planes(shape, _uniform(shape, bits))
    return Pipeline(shape, (), HalfRange(shape), (groups,), Rounded(bits), coder)


def _rotated(
    shape: StackShape, quantiser: Quantiser, bits: np.ndarray, is_fitted: bool = False
) -> Pipeline:
    """Norm as fp16, signs and Hadamard, ``bits`` for each column of codes."""
    gain = HalfGain(shape, is_fitted)
    return Pipeline(shape, (), gain, (SignHadamard(shape),), quantiser, _planes(shape, bits))


def _lloyd(shape: StackShape, num_levels: int) -> LloydMax:
    size = (shape.num_units, shape.width)
    return LloydMax(np.full(size, num_levels), np.ones(size, np.float32))


def _uniform(shape: StackShape, num_bits: int) -> np.ndarray:
    return np.full(shape.width, num_bits)


def _planes(shape: StackShape, bits: np.ndarray) -> BitPlanes:
    return BitPlanes(np.tile(bits, (shape.num_units, 1)))
