"""All methods by name, and how to make one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from kvstore.codecs.catalogue.entries import Parameter
from kvstore.codecs.names import CODECS, FAMILIES, with_parameters
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.rows.backend import reference_kernel
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.errors import UnknownCodec
from thermocline.method import Method

Backend: TypeAlias = Literal["auto", "numpy"]


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
