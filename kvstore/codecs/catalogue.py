"""The table of all codecs: names, bits, sentences, papers, and import strings of their code.

``OWN`` has the product's own codecs, ``STATES`` and ``WINDOWS`` its ways to pack recurrent states
and window rows. ``LITERATURE`` has methods of papers, and of the projects from which this one grew.
They are for comparison and are measured by the same tests; a server uses one only if its settings
name it. Nothing heavy is imported here; ``names`` reads the table.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from kvstore.errors import UnknownCodec

# A function that makes a codec from its parameters, or an import string of the function.
MakeCodec: TypeAlias = str | Callable[..., Any]


class Parameter(NamedTuple):
    """A number that a codec's name may set, as in ``kivi:bits=4``."""

    name: str
    usual: float
    least: float = -math.inf
    most: float = math.inf
    is_whole: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.span}, usually {self.usual:g})"

    @property
    def span(self) -> str:
        """The range of accepted values, in words."""
        if not math.isinf(self.least) and not math.isinf(self.most):
            return f"{self.least:g} to {self.most:g}"
        return "any whole number" if self.is_whole else "any number"


class CodecEntry(NamedTuple):
    """One row of the table.

    ``bits``: per value, for heads of 128 values and chunks of 128 tokens; headers and the exact
    first tokens of a session are not counted. For a learned codec, the usual rate of models; NaN
    if it is not known.
    """

    bits: float
    sentence: str
    make: MakeCodec = ""  # makes the codec; "" = only a profile can make it
    learn: object = ""  # its ``CalibratedPreset``, or an import string; "" = nothing is learned
    exact: bool = False  # True: values are restored bit for bit
    parameters: tuple[Parameter, ...] = ()
    paper: str = ""  # the paper or project, and where to find it


class StateEntry(NamedTuple):
    """A way to pack matrices of recurrent states.

    ``bits``: per value, without scales. ``learns``: it needs values learned from the model.
    """

    bits: int
    sentence: str
    learns: bool = False


_ROWS: Final = "kvstore.codecs.rows.row_codec"
_ONE_STEP: Final = "kvstore.codecs.one_step.one_step"

OWN: Final[dict[str, CodecEntry]] = {
    "raw": CodecEntry(
        16,
        "Keeps every byte as the engine has it.",
        make="kvstore.codecs.base:RawCodec",
        exact=True,
    ),
    "lm3": CodecEntry(
        3.25,
        "Eight Lloyd-Max levels without rotation; the control.",
        make=f"{_ROWS}:lm3",
    ),
    "tq3": CodecEntry(
        3.125,
        "Rotates every row by signs and a Hadamard matrix, then stores three bits per value.",
        make=f"{_ROWS}:tq3",
        paper="TurboQuant, arXiv 2504.19874",
    ),
    "tq4": CodecEntry(
        4.125,
        "Rotates every row by signs and a Hadamard matrix, then stores four bits per value.",
        make=f"{_ROWS}:tq4",
        paper="TurboQuant, arXiv 2504.19874",
    ),
    "dense3": CodecEntry(
        3.2,
        "Three bits at a fixed rate: a learned transform of each head, or tq3 without a profile.",
        make=f"{_ROWS}:dense3",
        learn="kvstore.codecs.fixed_rate.fixed_rate:DENSE3",
    ),
    "balanced": CodecEntry(
        1.5,
        "A learned transform of each layer, entropy-coded: half the size of dense3.",
        learn=f"{_ONE_STEP}:BALANCED",
    ),
    "max": CodecEntry(
        0.95,
        "A learned transform of ten layers at once, entropy-coded: the densest.",
        learn=f"{_ONE_STEP}:MAX",
    ),
    "safe": CodecEntry(
        5.3,
        "A learned transform of each layer with a fine step: greedy text hardly ever changes.",
        learn=f"{_ONE_STEP}:SAFE",
    ),
}


# Ways to pack window rows, by name, and their codecs. A name is joined to a preset of rows by a
# plus, as in ``dense3+window4``; without one, the preset itself packs window rows. These rows are
# few, and the tokens that follow attend to them most.
WINDOWS: Final[dict[str, str]] = {"window4": "tq4"}
# Ways to pack recurrent states, joined as in ``dense3+state8``; without one states stay exact.
STATES: Final[dict[str, StateEntry]] = {
    "state16": StateEntry(16, "Rounds recurrent states to bf16."),
    "state8": StateEntry(8, "Recurrent states in 8 bits with a scale for each row."),
    "state6": StateEntry(6, "Recurrent states in 6 bits with a scale for each row."),
    "state4": StateEntry(4, "Recurrent states in 4 bits with a scale for each row."),
    "dealt6": StateEntry(6, "6 bits on average, more for rows whose errors cost more.", True),
    "dealt5": StateEntry(5, "5 bits on average, more for rows whose errors cost more.", True),
    "dealt4": StateEntry(4, "4 bits on average, more for rows whose errors cost more.", True),
}
USUAL_STATES: Final = "state8"  # for a lossy preset whose name has no way to pack states
WORST: Final = "state4"  # not measured if the ``dealt`` ways are

_PAPERS: Final = "kvstore.codecs.literature"

LITERATURE: Final[dict[str, CodecEntry]] = {
    "spectral": CodecEntry(
        2.5,
        "SpectralQuant: many bits for principal components with variance, few for the others.",
        learn=f"{_PAPERS}.spectral_quant:SPECTRAL",
        paper="SpectralQuant (Dynamis-Labs)",
    ),
    "ratequant": CodecEntry(
        2.6,
        "RateQuant: TurboQuant-MSE with more bits for heads whose errors cost more.",
        learn=f"{_PAPERS}.rate_quant:RATEQUANT",
        parameters=(
            Parameter("bits", 2.5, 1, 8, is_whole=False),
            Parameter("least", 2, 0, 8),
            Parameter("by_layer", 0, 0, 1),
        ),
        paper="RateQuant, arXiv 2605.06675",
    ),
    "kvquant": CodecEntry(
        3.375,
        "KVQuant: keys before RoPE in groups by channel, values in groups by token.",
        learn=f"{_PAPERS}.groups:KVQUANT",
        paper="KVQuant, arXiv 2401.18079",
    ),
    "commvq": CodecEntry(
        2.125,
        "CommVQ: eight neighbouring values as a sum of two learned vectors.",
        learn=f"{_PAPERS}.comm_vq:COMMVQ",
        parameters=(Parameter("dim", 8, 2, 64), Parameter("stages", 2, 1, 8)),
        paper="CommVQ, arXiv 2506.18879",
    ),
    "manthan": CodecEntry(
        3.25,
        "ManthanQuant: eight Lloyd-Max levels and an fp32 norm; the arithmetic of lm3.",
        make=f"{_PAPERS}.seeds:manthan",
        paper="ManthanQuant",
    ),
    **{
        f"tq{num_bits}": CodecEntry(
            num_bits + 0.125,
            f"TurboQuant-MSE with {num_bits} bit{'s' if num_bits > 1 else ''} per value.",
            make=f"{_PAPERS}.turbo_quant:tq{num_bits}",
            paper="TurboQuant, arXiv 2504.19874",
        )
        for num_bits in (1, 2, 5, 6, 7, 8)
    },
    "tqprod": CodecEntry(
        3.25,
        "TurboQuant-prod: two bits of levels, and one sign of a sketch of their error.",
        make=f"{_PAPERS}.turbo_quant:tqprod",
        parameters=(Parameter("bits", 3, 2, 4),),
        paper="TurboQuant, arXiv 2504.19874",
    ),
    "base11": CodecEntry(
        3.625,
        "turboquant-mlx: eleven levels after a rotation, as digits of large numbers.",
        make=f"{_PAPERS}.seeds:base11",
        paper="turboquant-mlx, after TurboQuant (arXiv 2504.19874)",
    ),
    "rvq": CodecEntry(
        2.125,
        "VeloxQuant's residual quantiser: a sign, then the sign of its error.",
        make=f"{_PAPERS}.seeds:rvq",
        parameters=(Parameter("bits", 1, 1, 3),),
        paper="VeloxQuant",
    ),
    "vecinfer": CodecEntry(
        2.1875,
        "VecInfer: smoothed and rotated keys, four neighbouring values as one of 256 vectors.",
        make=f"{_PAPERS}.vecinfer:vecinfer",
        parameters=(Parameter("bits", 2, 1, 2),),
        paper="VecInfer, arXiv 2510.06175",
    ),
    "polar": CodecEntry(
        3.875,
        "PolarQuant: angles of recursive polar coordinates, and one radius of sixteen values.",
        make=f"{_PAPERS}.polar_quant:polar",
        paper="PolarQuant, arXiv 2502.02617",
    ),
    "qjl": CodecEntry(
        2.0625,
        "QJL: a sketch of signs for keys, groups of two bits for values.",
        make=f"{_PAPERS}.qjl:qjl",
        parameters=(Parameter("signs", 0, 0, 4096),),
        paper="QJL, arXiv 2406.03482",
    ),
    "rabitq": CodecEntry(
        2.6875,
        "RaBitQ: one bit per value of rotated keys less their centroid, four bits for values.",
        make=f"{_PAPERS}.rabitq:rabitq",
        learn=f"{_PAPERS}.rabitq:RABITQ",
        parameters=(
            Parameter("bits", 1, 1, 8),
            Parameter("clusters", 1, 1, 256),
            Parameter("unbiased", 1, 0, 1),
        ),
        paper="RaBitQ, SIGMOD 2024, arXiv 2405.12497, and arXiv 2409.09913",
    ),
    "playground": CodecEntry(
        3.0625,
        "turboQuantPlayground: rotated keys of three bits, values in groups of two bits.",
        make=f"{_PAPERS}.seeds:playground",
        parameters=(
            Parameter("key_bits", 3, 1, 8),
            Parameter("value_bits", 2, 1, 8),
            Parameter("group", 32, 2, 1024),
        ),
        paper="turboQuantPlayground, after arXiv 2504.19874 and arXiv 2402.02750",
    ),
    "kivi": CodecEntry(
        3.0,
        "KIVI: groups of 32 values of two bits, keys by channel and values by token.",
        make=f"{_PAPERS}.groups:kivi",
        parameters=(Parameter("bits", 2, 1, 8), Parameter("group", 32, 2, 1024)),
        paper="KIVI, arXiv 2402.02750",
    ),
    "gear": CodecEntry(
        4.75,
        "GEAR: KIVI's groups, a low-rank part of their error, and separate outliers.",
        make=f"{_PAPERS}.gear:gear",
        parameters=(
            Parameter("bits", 2, 1, 8),
            Parameter("rank", 4, 0, 32),
            Parameter("outliers", 2, 0, 20, is_whole=False),
            Parameter("group", 32, 2, 1024),
        ),
        paper="GEAR, arXiv 2403.05527",
    ),
    "fp8": CodecEntry(
        8,
        "Floats of 8 bits, e4m3, with a scale for each tensor: an engine's own fp8 KV cache.",
        make=f"{_PAPERS}.eight_bits:fp8",
        paper="FP8 Formats for Deep Learning, arXiv 2209.05433",
    ),
    "q8": CodecEntry(
        8.5,
        "Integers of 8 bits in blocks of 32 with a scale: q8_0 of llama.cpp.",
        make=f"{_PAPERS}.eight_bits:q8",
        paper="llama.cpp, q8_0",
    ),
}


def is_import_string(text: str) -> bool:
    """Return whether ``text`` has the form ``module:Attr``."""
    module_name, _, attribute = text.partition(":")
    return bool(attribute) and all(part.isidentifier() for part in module_name.split("."))


def imported(name: str, target: str) -> Any:
    """Return the object that the import string ``target`` names, for the codec ``name``.

    Raises:
        UnknownCodec: ``target`` is no import string, or its object cannot be imported.
    """
    if not is_import_string(target):
        raise UnknownCodec(f"codec {name!r}: {target!r} is no import string, module:Attr")
    module_name, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UnknownCodec(f"codec {name!r} cannot be imported: {error}") from error
