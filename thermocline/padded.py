"""Packs rows of any length with a codec that takes only certain lengths.

Rows are padded with zeros to the next length that the codec can pack, and the zeros are cut off
when rows are restored. Packed sizes include them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from kvstore.codecs.base import Codec, Payload, check_claim
from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import KVLayer, KVLayout, KVPair, KVRun, tokens_in

STEP = 8  # only multiples of it are tried as padded lengths
MOST = 256  # the number of zeros that are added at most


@dataclass(frozen=True)
class PaddedCodec:
    """A codec that pads rows for another one. Implements ``kvstore.codecs.base.Codec``."""

    inner: Codec

    @property
    def id(self) -> str:
        return self.inner.id

    @property
    def exact(self) -> bool:
        return self.inner.exact

    def check(self, layout: KVLayout) -> None:
        self.inner.check(padded_layout(self.inner, layout))

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        wide = padded_layout(self.inner, layout)
        return self.inner.packed_nbytes(wide, num_tokens, first_token)

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        # Padding can only add bytes, so the size without it is a lower bound.
        return self.inner.least_nbytes(layout, num_tokens, first_token)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> Payload:
        wide = padded_layout(self.inner, layout)
        if wide != layout:
            run = _filled(wide.empty(tokens_in(run)), run)
        return self.inner.encode(run, wide, first_token)

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        num_tokens = tokens_in(out)
        wide = claimed_layout(self.inner, layout, num_tokens, first_token, len(payload))
        if wide == layout:
            return self.inner.decode(payload, layout, first_token, out)
        whole = wide.empty(num_tokens)
        self.inner.decode(payload, wide, first_token, whole)
        for pair, wide_pair in zip(out, whole, strict=True):
            for array, wide_array in zip(pair, wide_pair, strict=True):
                array[...] = wide_array[..., : array.shape[2]]


def padded_layout(codec: Codec, layout: KVLayout) -> KVLayout:
    """Return ``layout`` with each dimension raised to the next one that ``codec`` can pack.

    Raises:
        UnknownCodec: ``MOST`` more values are not enough, or the codec refuses the layout for
            another reason.
    """
    try:
        codec.check(layout)
        return layout
    except UnknownCodec:
        layers = tuple(_padded_layer(codec, layer) for layer in layout.layers)
        if layers == layout.layers:
            raise
        wide = msgspec.structs.replace(layout, layers=layers)
        codec.check(wide)
        return wide


def claimed_layout(
    codec: Codec, layout: KVLayout, num_tokens: int, first_token: int, nbytes: int
) -> KVLayout:
    """Return ``padded_layout`` of a layout that a header, not yet trusted, claims for a payload.

    Raises:
        Corrupt: ``nbytes`` of payload are too few for it, or ``codec`` cannot pack it.
    """
    check_claim(codec, layout, num_tokens, first_token, nbytes)
    try:
        wide = padded_layout(codec, layout)
    except UnknownCodec as error:
        raise Corrupt(f"packed rows of another layout: {error}") from error
    if wide != layout:
        check_claim(codec, wide, num_tokens, first_token, nbytes)
    return wide


def _padded_layer(codec: Codec, layer: KVLayer) -> KVLayer:
    return msgspec.structs.replace(
        layer,
        head_dim=_padded_dim(codec, layer.head_dim),
        value_dim=_padded_dim(codec, layer.value_dim),
    )


def _padded_dim(codec: Codec, dim: int) -> int:
    """Return the next length that ``codec`` takes; 0 stays 0."""
    if not dim or _takes(codec, dim):
        return dim
    first = dim // STEP * STEP + STEP
    for wide in range(first, first + MOST, STEP):
        if _takes(codec, wide):
            return wide
    raise UnknownCodec(f"codec {codec.id} packs no vectors of {dim} to {first + MOST} values")


def _takes(codec: Codec, dim: int) -> bool:
    try:
        codec.check(KVLayout("float32", (KVLayer(1, dim, dim),)))
    except UnknownCodec:
        return False
    return True


def _filled(wide: list[KVPair], run: KVRun) -> list[KVPair]:
    for pair, wide_pair in zip(run, wide, strict=True):
        for array, wide_array in zip(pair, wide_pair, strict=True):
            dim: int = array.shape[2]
            wide_array[..., :dim] = array
            wide_array[..., dim:] = np.zeros((), wide_array.dtype)
    return wide
