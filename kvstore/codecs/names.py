"""The names of all codecs, for code that needs only names: nothing heavy is imported here.

``presets`` makes a codec from a name, ``calibrated`` from a name and a profile; both find the code
by the import strings of the ``catalogue``. ``OWN`` holds the product's codecs, ``LITERATURE`` the
methods of papers, and ``registration`` adds a user's own.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvstore.codecs.catalogue import LITERATURE as LITERATURE
from kvstore.codecs.catalogue import OWN as OWN
from kvstore.codecs.catalogue import STATES, USUAL_STATES, WINDOWS, WORST, CodecEntry, Parameter

EXACT: Final = "raw"
USUAL: Final = "dense3"  # the usual choice for most models

JOIN: Final = "+"


class PresetParts(NamedTuple):
    """A preset's name in parts: the codec of rows, and the ways to pack windows and states.

    A part that the name lacks is "". An unknown part is put into ``states``, and the code that
    looks up that way refuses it.
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
    """Return a preset's name for a model: without parts that the model does not have.

    A lossy preset without a way to pack states gets the usual one.
    """
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
    """Return the combinations to measure on a model with states, for presets of rows.

    Every preset is joined with the usual way to pack states. A preset of the product that has fewer
    bits than a way to pack windows is also joined with that way. ``USUAL`` is joined with all ways
    to pack states. For a model without rows, only the ways to pack states are returned.

    Args:
        names: the presets of rows.
        has_rows: whether the model stores rows of every token.
        has_windows: whether it has layers with sliding windows.
        has_matrices: whether it has recurrent states.
        deals: whether the cost of errors in states is known, so that the ``dealt`` ways can be
            measured.
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
    """Return whether a part of a preset is learned from the model."""
    rows, _, states = parts_of(name)
    return is_learned(rows) or (states in STATES and STATES[states].learns)


def first_part(name: str) -> str:
    """Return the codec of rows in a preset's name."""
    return parts_of(name).rows


# Codecs of other engines that are considered harmless; measured too, to compare the loss.
FLOOR: Final = ("fp8", "q8")

# ``registration`` adds entries.
CODECS: Final[dict[str, CodecEntry]] = {**OWN, **LITERATURE}
# The product's codecs that need no profile.
READY: Final = tuple(name for name, entry in OWN.items() if entry.make)
# The product's codecs that learn from a model; "dense3" is in both lists.
CALIBRATED: Final = tuple(name for name, entry in OWN.items() if entry.learn)
# Families of codecs that have a name for each number of bits: ``tq:bits=5`` is ``tq5``.
FAMILIES: Final = {"tq": Parameter("bits", 3, 1, 8)}
# All codecs of the table that learn from a model.
LEARNABLE: Final = tuple(name for name, entry in CODECS.items() if entry.learn)


def is_learned(name: str) -> bool:
    """Return whether a codec, with or without parameters, learns from a model."""
    family = family_of(name)
    return family in CODECS and bool(CODECS[family].learn)


def family_of(name: str) -> str:
    """Return a codec's name without its parameters: ``kivi`` of ``kivi:bits=4``."""
    return name.partition(":")[0] if "=" in name else name


def canonical(name: str) -> str:
    """Return the canonical form of a preset's name.

    Parameters that have their usual value are left out, others follow the order of the table, and a
    member of a family has a name of its own: ``tq:bits=4`` is ``tq4``.

    Raises:
        ValueError: it names no codec, or sets parameters that the codec does not take; the message
            lists those that exist.
    """
    parts = parts_of(name)
    return parts._replace(rows=_canonical_rows(parts.rows)).name


def parameters_of(name: str) -> dict[str, float]:
    """Return all parameters of the codec, as set in its name; the others have their usual values.

    Raises ``ValueError`` as ``canonical``.
    """
    family = family_of(name)
    known = {x.name: x for x in _parameters_of_family(family)}
    found, given = {x.name: x.usual for x in known.values()}, set[str]()
    for item in filter(None, name[len(family) + 1 :].split(",")):
        key, _, text = item.partition("=")
        if key not in known:
            there = ", ".join(map(str, known.values())) or "none"
            raise ValueError(f"codec {family!r} has no parameter {key!r}; there are {there}")
        if key in given:
            raise ValueError(f"codec {name!r} sets {key!r} twice")
        given.add(key)
        found[key] = _number(family, known[key], text)
    return found


def with_parameters(name: str, parameters: Mapping[str, float]) -> str:
    """Return the name of a codec with parameters, in the form of ``canonical``.

    Raises ``ValueError`` as ``canonical``.
    """
    if not parameters:
        return canonical(name)
    given = ",".join(f"{key}={_text_of(value)}" for key, value in parameters.items())
    return canonical(f"{name}{',' if '=' in name else ':'}{given}")


def _text_of(value: object) -> str:
    """Return a parameter's value as text, which ``canonical`` refuses if it is not a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if is_number else repr(value).replace(",", " ")


def split_names(text: str) -> list[str]:
    """Split a list of names at its commas, except those between parameters."""
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
    """Return the sentence for a name that no codec has: all names, and the most similar one."""
    near = difflib.get_close_matches(name, [*CODECS, *FAMILIES], n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"no codec named {name!r}{hint}; there are {', '.join(CODECS)}"


def _canonical_rows(name: str) -> str:
    family = family_of(name)
    if family == name and name not in FAMILIES:
        return name  # without parameters; perhaps a user's import string
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
    is_allowed = math.isfinite(value) and parameter.least <= value <= parameter.most
    if not is_allowed or (parameter.is_whole and value != int(value)):
        kind = "a whole number" if parameter.is_whole else "a number"
        within = f"{kind} from {parameter.span}".replace(f"{kind} from any", "any")
        raise ValueError(f"{parameter.name}={text} of codec {family!r}: {within} is wanted")
    return int(value) if parameter.is_whole else value
