"""The product's own codecs."""

from __future__ import annotations

from typing import Final

from kvstore.codecs.catalogue.entries import CodecEntry

_ROWS: Final = "kvstore.codecs.rows.row_codec"
_ONE_STEP: Final = "kvstore.codecs.one_step.one_step"

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
        paper="TurboQuant, arXiv 2504.19874",
    ),
    "tq4": CodecEntry(
        4.125,
        "Rotates every row by signs and a Hadamard matrix, then takes four bits a value.",
        make=f"{_ROWS}:tq4",
        small_chunks=True,
        paper="TurboQuant, arXiv 2504.19874",
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
