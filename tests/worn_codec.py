"""A lossy codec that counts: each passage adds its wear to every number.

So a restored row says how often, and by which codecs, it was packed since it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore.codecs.base import RawCodec
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout, KVRun


@dataclass(frozen=True)
class WornCodec:
    """For layouts of 16-bit numbers, taken as integers. Implements ``Codec``."""

    id: str
    wear: int
    exact: bool = False
    packed: list[int] = field(default_factory=list, compare=False)  # first token of each passage

    def check(self, layout: KVLayout) -> None:
        if layout.numpy_dtype.itemsize != 2:
            raise UnknownCodec("made for numbers of 16 bits")

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return RawCodec().packed_nbytes(layout, num_tokens, first_token)

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return self.packed_nbytes(layout, num_tokens, first_token)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        self.packed.append(first_token)
        return RawCodec().encode(run, layout, first_token)

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        RawCodec().decode(payload, layout, first_token, out)
        for array in (x for pair in out for x in pair):
            array += np.array(self.wear, array.dtype)


@dataclass(frozen=True)
class ThinCodec(WornCodec):
    """One that also halves: for rows of ``kv_of`` in bf16 that nothing was done to.

    Rows that were packed before do not fit into it.
    """

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return layout.elements_per_token * num_tokens

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        self.packed.append(first_token)
        arrays = [x for pair in run for x in pair]
        assert all(np.all(x & _EXPONENT == _USUAL) for x in arrays), "packed a second time"
        return b"".join((x >> 8 & 0x80 | x & 0x7F).astype(np.uint8).tobytes() for x in arrays)

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        at = 0
        for array in (x for pair in out for x in pair):
            thin = np.frombuffer(payload, np.uint8, array.size, at).reshape(array.shape)
            at += array.size
            wide = thin.astype(np.uint16)
            array[...] = (wide & 0x80) << 8 | wide & 0x7F | _USUAL
            array += np.array(self.wear, array.dtype)


_EXPONENT, _USUAL = np.uint16(0x7F80), np.uint16(0x3F00)


def wear_of(found: KVRun, computed: KVRun) -> list[set[int]]:
    """By token: the changes of its numbers' bits; {0} is an exact token."""
    worn = [
        (a.view(np.uint16) - b.view(np.uint16))
        for one, other in zip(found, computed, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    num_tokens = worn[0].shape[1] if worn else 0
    return [{int(x) for array in worn for x in np.unique(array[:, i])} for i in range(num_tokens)]
