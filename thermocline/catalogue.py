"""All methods by name, and how to make one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from kvstore.codecs.names import CODECS
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import Profile
from kvstore.codecs.rows.backend import reference_kernel
from kvstore.codecs.rows.row_codec import RowCodec
from thermocline.method import Method

Backend: TypeAlias = Literal["auto", "numpy"]


@dataclass(frozen=True)
class CodecInfo:
    """One row of the catalogue."""

    bits: float  # per value, for heads of 128 values; of a learned method about what models take
    sentence: str
    needs_profile: bool  # it has to learn the model first


def codecs() -> dict[str, CodecInfo]:
    """Returns all methods by name: the product's own first, then those of papers."""
    return {
        name: CodecInfo(entry.bits, entry.sentence, not entry.make)
        for name, entry in CODECS.items()
    }


def codec(name: str, *, profile: Profile | None = None, backend: Backend = "auto") -> Method:
    """Makes a method. ``profile`` is what methods that learn a model have learned of it.

    ``backend`` "numpy": the definition instead of compiled kernels, which give the same bytes.

    Raises:
        UnknownCodec: there is none of this name, or it needs a profile; says which there are.
        ValueError: no such backend, or this method has no choice of it.
    """
    if backend not in ("auto", "numpy"):
        raise ValueError(f"backend {backend!r} is neither 'auto' nor 'numpy'")
    made = open_codec(name, profile)
    if backend == "numpy":
        if not isinstance(made, RowCodec):
            raise ValueError(f"codec {name!r} has no choice of backends; only rows have")
        made = replace(made, backend=reference_kernel)
    return Method(made)
