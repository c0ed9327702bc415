"""All methods by name, how to make one, and the levels that most of them quantise to."""

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
    """One row of the catalogue."""

    bits: float  # per value, for heads of 128 values; of a learned method about what models take
    sentence: str
    needs_profile: bool  # it has to learn the model first
    paper: str = ""  # or project, and where to find it
    parameters: tuple[Parameter, ...] = ()  # for ``codec``; their names, usual and extreme values


def codecs() -> dict[str, CodecInfo]:
    """Returns all methods by name: the product's own, those of papers, those of ``register``.

    ``tq``, with any number of bits, is the family of ``tq1`` to ``tq8``.
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
    """Makes a method, such as ``codec("kivi", bits=4)``, or ``codec("kivi:bits=4")``, the same.

    ``profile`` holds the arrays that methods have learned from a model, under this very name.
    ``backend`` "numpy": the definition instead of compiled kernels, which give the same bytes.

    Raises:
        UnknownCodec: there is none of this name or with this parameter, or it needs a profile;
            says which there are.
        ValueError: no such backend, or this method has no choice of it.
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
    """Returns the ``2 ** bits`` best levels for rotated rows, fp32, ascending, read-only.

    Rows have a root mean square of one. ``dim`` None: the levels for a normal variable, which all
    methods here use. Otherwise the exact ones for rows of ``dim`` values: an element of a random
    direction has a Beta law, which tends to the normal one. They are computed once and kept.

    Raises:
        ValueError: ``bits`` is not 1 to 8, or ``dim`` below 4.
    """
    if not isinstance(bits, int):
        raise ValueError(f"{bits!r} bits; a whole number from 1 to {MOST_BITS} is wanted")
    if not 1 <= bits <= MOST_BITS:
        raise ValueError(f"{bits} bits; 1 to {MOST_BITS} are possible")
    table = gauss_table(1 << bits) if dim is None else sphere_table(1 << bits, dim)
    levels = table.all_levels()
    levels.setflags(write=False)
    return levels
