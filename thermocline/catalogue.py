"""The catalogue of methods by name, how to make one, and the levels that most of them round to."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from kvstore.codecs.catalogue import Parameter
from kvstore.codecs.names import CODECS, FAMILIES, with_parameters
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.rows.backend import reference_kernel
from kvstore.codecs.rows.lloyd_max import gauss_table, sphere_table
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.errors import UnknownCodec
from thermocline.method import Method

Backend: TypeAlias = Literal["auto", "numpy"]
MOST_BITS = 8


@dataclass(frozen=True)
class CodecInfo:
    """The description of one method, as ``codecs`` returns it."""

    bits: float  # per value, for heads of 128 values; for a learned method, typical of models
    sentence: str
    needs_profile: bool  # it has to learn the model first
    paper: str = ""  # the paper or project that it is from, and where to find that
    parameters: tuple[Parameter, ...] = ()  # that ``codec`` accepts: name, default, least and most


def codecs() -> dict[str, CodecInfo]:
    """Return all methods by name: Thermocline's own, those from papers, those registered.

    The entry ``tq`` stands for ``tq1`` to ``tq8``; the number of bits is its parameter.
    """
    found = {
        name: CodecInfo(entry.bits, entry.sentence, not entry.make, entry.paper, entry.parameters)
        for name, entry in CODECS.items()
    }
    for family, parameter in FAMILIES.items():
        usual = found[f"{family}{parameter.usual}"]
        found[family] = replace(usual, parameters=(parameter,))
    return found


def codec(
    name: str,
    *,
    profile: Profile | None = None,
    backend: Backend = "auto",
    **parameters: float,
) -> Method:
    """Make a method; ``codec("kivi", bits=4)`` and ``codec("kivi:bits=4")`` make the same one.

    ``profile`` is the result of ``learn`` for this name; only methods that learn a model need it.
    ``backend`` "numpy" runs the reference implementation instead of compiled kernels; both give
    the same bytes.

    Raises:
        UnknownCodec: there is no method of this name, it has no such parameter, or it needs a
            profile; the message lists the known names or parameters.
        ValueError: there is no such backend, or the method has only one.
    """
    if not isinstance(name, str):
        raise UnknownCodec(f"codec {name!r}: a name is wanted; thermocline.codecs() lists them")
    if backend not in ("auto", "numpy"):
        raise ValueError(f"backend {backend!r} is neither 'auto' nor 'numpy'")
    try:
        made = open_codec(with_parameters(name, parameters), profile)
    except ValueError as error:
        raise UnknownCodec(str(error)) from error
    if backend == "numpy":
        if not isinstance(made, RowCodec):
            raise ValueError(f"codec {name!r} has no choice of backends; only rows have")
        made = replace(made, backend=reference_kernel)
    return Method(made)


@functools.cache
def codebook(bits: int, dim: int | None = None) -> np.ndarray:
    """Return the ``2 ** bits`` Lloyd-Max levels for rotated rows, fp32, ascending, read-only.

    The levels are for rows with a root mean square of one. With ``dim`` None they are those of the
    normal distribution, which all methods here use. Otherwise they are exact for rows of ``dim``
    values: an element of a random direction has a Beta distribution, which tends to the normal one
    as ``dim`` grows. The result is cached.

    Raises:
        ValueError: ``bits`` is not 1 to 8, or ``dim`` is below 4.
    """
    if not isinstance(bits, int):
        raise ValueError(f"{bits!r} bits; a whole number from 1 to {MOST_BITS} is wanted")
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"{bits} bits; 1 to {MOST_BITS} are possible")
    table = gauss_table(1 << bits) if dim is None else sphere_table(1 << bits, dim)
    levels = table.all_levels()
    levels.setflags(write=False)
    return levels
