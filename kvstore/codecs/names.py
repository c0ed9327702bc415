"""The names of all codecs, for whoever needs only names: nothing heavy is imported here.

``presets`` makes a codec of a name, ``calibrated`` one of a name and a profile; both find the code
by the import strings of this table. ``OWN`` are the product's codecs. ``LITERATURE`` are methods of
papers and of the projects that this one grew from: for comparison, measured by the same tests, and
never served unless they are named.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvstore.codecs.states.ways import STATES, USUAL_STATES, WINDOWS, WORST


class Parameter(NamedTuple):
    """A number that a codec's name may give, as in ``kivi:bits=4``."""

    name: str
    usual: float
    least: float
    most: float
    is_whole: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.least:g} to {self.most:g}, usually {self.usual:g})"


class CodecEntry(NamedTuple):
    """One row of the table.

    ``bits``: per value, for heads of 128 values and chunks of 128 tokens; headers and the exact
    first tokens of a session are not counted. Of a learned codec, about what models take.
    """

    bits: float
    sentence: str
    make: str = ""  # import string of what makes the codec; "" = only a profile can
    learn: str = ""  # import string of its ``CalibratedPreset``; "" = nothing to learn
    exact: bool = False  # nothing is lost
    small_chunks: bool = False  # chunks of few tokens take no more bytes per token
    parameters: tuple[Parameter, ...] = ()


EXACT: Final = "raw"
USUAL: Final = "dense3"  # what most models get

_ROWS: Final = "kvstore.codecs.rows.row_codec"
_ONE_STEP: Final = "kvstore.codecs.one_step.one_step"
_PAPERS: Final = "kvstore.codecs.literature"

OWN: Final[dict[str, CodecEntry]] = {
    "raw": CodecEntry(
        16,
        "Keeps every byte as the engine has it.",
        make="kvstore.codecs.raw:RawCodec",
        exact=True,
        small_chunks=True,
    ),
    "lm3": CodecEntry(
        3.25,
        "Eight Lloyd-Max levels without rotation; the control.",
        make=f"{_ROWS}:lm3",
        small_chunks=True,
    ),
    "tq3": CodecEntry(
        3.125,
        "Rotates every row by signs and a Hadamard matrix, then takes three bits a value.",
        make=f"{_ROWS}:tq3",
        small_chunks=True,
    ),
    "tq4": CodecEntry(
        4.125,
        "Rotates every row by signs and a Hadamard matrix, then takes four bits a value.",
        make=f"{_ROWS}:tq4",
        small_chunks=True,
    ),
    "dense3": CodecEntry(
        3.2,
        "Three bits at a fixed rate: a learned transform of each head, or tq3 without a profile.",
        make=f"{_ROWS}:dense3",
        learn="kvstore.codecs.fixed_rate.fixed_rate:DENSE3",
        small_chunks=True,
    ),
    "balanced": CodecEntry(
        1.5,
        "A learned transform of each layer, entropy-coded: half the size of dense3.",
        learn=f"{_ONE_STEP}:BALANCED",
    ),
    "max": CodecEntry(
        0.8,
        "A learned transform of ten layers at once, entropy-coded: the densest.",
        learn=f"{_ONE_STEP}:MAX",
    ),
    "safe": CodecEntry(
        5.3,
        "A learned transform of each layer with a fine step: greedy text hardly ever changes.",
        learn=f"{_ONE_STEP}:SAFE",
    ),
}

LITERATURE: Final[dict[str, CodecEntry]] = {
    "spectral": CodecEntry(
        2.5,
        "SpectralQuant: many bits for principal components with variance, few for the others.",
        learn=f"{_PAPERS}.spectral_quant:SPECTRAL",
    ),
    "ratequant": CodecEntry(
        2.6,
        "RateQuant: TurboQuant-MSE with the bits dealt out to heads by what errors cost.",
        learn=f"{_PAPERS}.rate_quant:RATEQUANT",
        parameters=(Parameter("bits", 2.5, 1, 8, is_whole=False), Parameter("least", 2, 0, 8)),
    ),
    "kvquant": CodecEntry(
        3.375,
        "KVQuant: keys before RoPE in groups by channel, values in groups by token.",
        learn=f"{_PAPERS}.kv_quant:KVQUANT",
    ),
    "commvq": CodecEntry(
        2.125,
        "CommVQ: eight neighbours as a sum of two learned vectors.",
        learn=f"{_PAPERS}.comm_vq:COMMVQ",
        parameters=(Parameter("dim", 8, 2, 64), Parameter("stages", 2, 1, 8)),
    ),
    "manthan": CodecEntry(
        3.25,
        "ManthanQuant: eight Lloyd-Max levels and an fp32 norm; the arithmetic of lm3.",
        make=f"{_PAPERS}.manthan_quant:manthan",
    ),
    **{
        f"tq{num_bits}": CodecEntry(
            num_bits + 0.125,
            f"TurboQuant-MSE with {num_bits} bit{'s' if num_bits > 1 else ''} a value.",
            make=f"{_PAPERS}.turbo_quant:tq{num_bits}",
        )
        for num_bits in (1, 2, 5, 6, 7, 8)
    },
    "tqprod": CodecEntry(
        3.25,
        "TurboQuant-prod: two bits of levels and one sign of a sketch of what they missed.",
        make=f"{_PAPERS}.turbo_quant:tqprod",
        parameters=(Parameter("bits", 3, 2, 4),),
    ),
    "base11": CodecEntry(
        3.625,
        "turboquant-mlx: eleven levels after a rotation, as digits of large numbers.",
        make=f"{_PAPERS}.turboquant_mlx:base11",
    ),
    "rvq": CodecEntry(
        2.125,
        "VeloxQuant's residual quantiser: a sign, then the sign of what it missed.",
        make=f"{_PAPERS}.rvq:rvq",
    ),
    "vecinfer": CodecEntry(
        2.1875,
        "VecInfer: smoothed keys, rotated, and four neighbours by one of 256 vectors.",
        make=f"{_PAPERS}.vecinfer:vecinfer",
        parameters=(Parameter("bits", 2, 1, 2),),
    ),
    "polar": CodecEntry(
        3.875,
        "PolarQuant: angles of recursive polar coordinates, and one radius of sixteen values.",
        make=f"{_PAPERS}.polar_quant:polar",
    ),
    "qjl": CodecEntry(
        2.0625,
        "QJL: a sketch of signs for keys, groups of two bits for values.",
        make=f"{_PAPERS}.qjl:qjl",
        parameters=(Parameter("signs", 0, 0, 4096),),
    ),
    "rabitq": CodecEntry(
        2.6875,
        "RaBitQ: one sign a value for rotated keys, TurboQuant of four bits for values.",
        make=f"{_PAPERS}.rabitq:rabitq",
    ),
    "playground": CodecEntry(
        3.0625,
        "turboQuantPlayground: rotated keys of three bits, values in groups of two bits.",
        make=f"{_PAPERS}.turboquant_playground:playground",
        parameters=(
            Parameter("key_bits", 3, 1, 8),
            Parameter("value_bits", 2, 1, 8),
            Parameter("group", 32, 2, 1024),
        ),
    ),
    "kivi": CodecEntry(
        3.0,
        "KIVI: groups of 32 values of two bits, keys by channel and values by token.",
        make=f"{_PAPERS}.kivi:kivi",
        parameters=(Parameter("bits", 2, 1, 8), Parameter("group", 32, 2, 1024)),
    ),
    "fp8": CodecEntry(
        8,
        "Floats of 8 bits, e4m3, with a scale for each tensor: an engine's own fp8 KV cache.",
        make=f"{_PAPERS}.fp8:fp8",
    ),
    "q8": CodecEntry(
        8.5,
        "Integers of 8 bits in blocks of 32 with a scale: q8_0 of llama.cpp.",
        make=f"{_PAPERS}.q8:q8",
    ),
}


JOIN: Final = "+"


class PresetParts(NamedTuple):
    """A preset's name in parts: the codec of rows, and the ways of windows and of states.

    "" where it does not name one. A way that does not exist is in ``states``, which refuses it.
    """

    rows: str
    windows: str = ""
    states: str = ""

    @property
    def name(self) -> str:
        return JOIN.join(filter(None, self))


def parts_of(name: str) -> PresetParts:
    """Split a preset's name, such as ``dense3+window4+state8``."""
    rows, _, ways = name.partition(JOIN)
    first, _, rest = ways.partition(JOIN)
    return PresetParts(rows, first, rest) if first in WINDOWS else PresetParts(rows, states=ways)


def for_session(name: str, has_windows: bool, has_matrices: bool) -> str:
    """Complete a preset's name for a model: one that loses something packs matrices, too."""
    rows, windows, states = parts_of(name)
    usual = USUAL_STATES if has_matrices and rows != EXACT else ""
    return PresetParts(
        rows, windows if has_windows else "", (states or usual) if has_matrices else ""
    ).name


def session_presets(
    names: Iterable[str],
    has_rows: bool,
    has_windows: bool,
    has_matrices: bool,
    deals: bool = False,
) -> tuple[str, ...]:
    """List the combinations to measure on a model with states, for presets of rows.

    Every preset is joined to the usual way of states, those of ours that are coarser to each way of
    windows, too, and ``USUAL`` to all ways of states. Without rows there are only the ways of
    states.

    Args:
        has_rows: of every token.
        deals: what errors in states cost is known, so ways that deal bits by it are among them.
    """
    ways = [x for x, entry in STATES.items() if entry.learns <= deals and (not deals or x != WORST)]
    if not has_rows and not has_windows:
        return (EXACT, *(f"{EXACT}{JOIN}{x}" for x in ways))
    presets = [for_session(name, has_windows, has_matrices) for name in names]
    found = dict.fromkeys(presets)
    if has_matrices and USUAL in map(first_part, found):
        found |= dict.fromkeys(f"{USUAL}{JOIN}{x}" for x in ways)
    if has_windows and has_rows:
        for way, codec in WINDOWS.items():
            coarser = [x for x in presets if _is_coarser(first_part(x), codec)]
            found |= dict.fromkeys(parts_of(x)._replace(windows=way).name for x in coarser)
    return tuple(found)


def _is_coarser(name: str, than: str) -> bool:
    return name in OWN and OWN[name].bits < OWN[than].bits


def must_learn(name: str) -> bool:
    """Tell if a part of a preset needs that the model was looked at."""
    rows, _, states = parts_of(name)
    return family_of(rows) in LEARNABLE or (states in STATES and STATES[states].learns)


def first_part(name: str) -> str:
    """Return the rows' codec in a preset's name."""
    return parts_of(name).rows


# What is usual elsewhere and taken for harmless: measured with ours, to see what a loss amounts to.
FLOOR: Final = ("fp8", "q8")

CODECS: Final[dict[str, CodecEntry]] = {**OWN, **LITERATURE}
# The product's codecs that need no profile.
READY: Final = tuple(name for name, entry in OWN.items() if entry.make)
# The product's codecs that learn a model; "dense3" is among both.
CALIBRATED: Final = tuple(name for name, entry in OWN.items() if entry.learn)
# Families of codecs that have a name for each number of bits: ``tq:bits=5`` is ``tq5``.
FAMILIES: Final = {"tq": Parameter("bits", 3, 1, 8)}
# All codecs that learn a model.
LEARNABLE: Final = tuple(name for name, entry in CODECS.items() if entry.learn)


def family_of(name: str) -> str:
    """Return a codec's name without its parameters: ``kivi`` of ``kivi:bits=4``."""
    return name.partition(":")[0] if "=" in name else name


def canonical(name: str) -> str:
    """Return the one way to write a preset's name.

    Parameters that have their usual value are left out, others follow the order of the table, and a
    member of a family has a name of its own: ``tq:bits=4`` is ``tq4``.

    Raises:
        ValueError: it names no codec, or gives it parameters that it does not take; says which
            there are.
    """
    parts = parts_of(name)
    return parts._replace(rows=_canonical_rows(parts.rows)).name


def parameters_of(name: str) -> dict[str, float]:
    """Return the parameters in a codec's name: all of its codec's, those left out as usual.

    Raises ``ValueError`` as ``canonical``.
    """
    family = family_of(name)
    known = {x.name: x for x in _parameters_of_family(family)}
    found = {x.name: x.usual for x in known.values()}
    for item in filter(None, name[len(family) + 1 :].split(",")):
        key, _, text = item.partition("=")
        if key not in known:
            there = ", ".join(map(str, known.values())) or "none"
            raise ValueError(f"codec {family!r} has no parameter {key!r}; there are {there}")
        found[key] = _number(family, known[key], text)
    return found


def with_parameters(name: str, parameters: Mapping[str, float]) -> str:
    """Return the name of a codec with parameters, written as ``canonical`` does.

    Raises ``ValueError`` as that.
    """
    if not parameters:
        return canonical(name)
    given = ",".join(f"{key}={value:g}" for key, value in parameters.items())
    return canonical(f"{name}{',' if '=' in name else ':'}{given}")


def split_names(text: str) -> list[str]:
    """Split a list of names at its commas, but for those between parameters."""
    names: list[str] = []
    for piece in (x.strip() for x in text.split(",")):
        if names and "=" in piece and ":" not in piece:
            names[-1] += f",{piece}"
        else:
            names.append(piece)
    return names


def _parameters_of_family(family: str) -> tuple[Parameter, ...]:
    if family in FAMILIES:
        return (FAMILIES[family],)
    if family not in CODECS:
        raise ValueError(unknown(family))
    return CODECS[family].parameters


def unknown(name: str) -> str:
    """Return the sentence for a name that no codec has: the names, and what may have been meant."""
    near = difflib.get_close_matches(name, [*CODECS, *FAMILIES], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"no codec named {name!r}{hint}; there are {', '.join(CODECS)}"


def _canonical_rows(name: str) -> str:
    family = family_of(name)
    if family == name and name not in FAMILIES:
        return name  # without parameters; an import string of one's own, perhaps
    found = parameters_of(name)
    if family in FAMILIES:
        return f"{family}{found[FAMILIES[family].name]:g}"
    usual = {x.name: x.usual for x in CODECS[family].parameters}
    given = [f"{key}={value:g}" for key, value in found.items() if value != usual[key]]
    return f"{family}:{','.join(given)}" if given else family


def _number(family: str, parameter: Parameter, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_allowed = parameter.least <= value <= parameter.most  # False of NaN
    if not is_allowed or (parameter.is_whole and value != int(value)):
        kind = "a whole number" if parameter.is_whole else "a number"
        raise ValueError(
            f"{parameter.name}={text} of codec {family!r}: {kind} from {parameter.least:g} to"
            f" {parameter.most:g} is wanted"
        )
    return int(value) if parameter.is_whole else value
