"""The shape of a model's KV, in plain numbers, and the rotation of its keys.

Arrays are numpy. numpy has no bfloat16, so a bf16 array is passed as its uint16 bit pattern; the
layout, never the array, determines the dtype.

A model rotates its keys by position (RoPE, arXiv 2104.09864): each pair of channels by the angle
position times frequency. ``Rope`` only describes the rotation and is part of every profile;
``codecs.stages`` uses it to rotate keys back. Latent attention keeps its rotated keys in the place
of values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

DType: TypeAlias = Literal["bfloat16", "float16", "float32"]

NUMPY_DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}

# One layer's (K, V); each (num_kv_heads, num_tokens, head_dim), rows of head_dim contiguous,
# strides between heads free. The caller owns the memory.
KVPair: TypeAlias = tuple[np.ndarray, np.ndarray]
# A run of consecutive tokens in all attention layers.
KVRun: TypeAlias = Sequence[KVPair]
RotatedSide: TypeAlias = Literal["values"]


MOST_IN_LAYER: Final = 1 << 20
# Bounds of the shapes that are read from files. msgspec checks them when it decodes a layer.
NumHeads: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_IN_LAYER)]
Dim: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_IN_LAYER)]


class KVLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attention layer whose K and V grow with every token.

    A dimension of 0 means that this side does not exist: there are only values, or only keys.
    """

    num_kv_heads: NumHeads
    head_dim: Dim
    value_dim: Dim


def is_latent(layer: KVLayer) -> bool:
    """Return whether a layer has the shape of multi-head latent attention.

    There the latent that all heads share is in the place of keys, and the rotated part of the keys
    in the place of values. A layer with one head whose keys and values differ in size looks the
    same.
    """
    return layer.num_kv_heads == 1 and 0 < layer.value_dim != layer.head_dim > 0


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers of one model that keep every token, as one rank of one engine holds them."""

    dtype: DType
    layers: tuple[KVLayer, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        return NUMPY_DTYPES[self.dtype]

    @property
    def elements_per_token(self) -> int:
        return sum(x.num_kv_heads * (x.head_dim + x.value_dim) for x in self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes while it is hot, in the engine's own dtype."""
        return self.elements_per_token * self.numpy_dtype.itemsize

    def empty(self, num_tokens: int) -> list[KVPair]:
        """Allocate arrays for ``num_tokens`` tokens of every layer, uninitialised."""
        return [
            (
                np.empty((x.num_kv_heads, num_tokens, x.head_dim), self.numpy_dtype),
                np.empty((x.num_kv_heads, num_tokens, x.value_dim), self.numpy_dtype),
            )
            for x in self.layers
        ]


class StateLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a model's state: sliding windows and recurrent layers.

    Args:
        windows: layers that keep the newest tokens only; None if the model has none whose rows can
            be packed.
        window_tokens: the most tokens that they keep.
        has_matrices: whether recurrent layers keep matrices that can be packed.
    """

    windows: KVLayout | None = None
    window_tokens: int = 0
    has_matrices: bool = False


class StoredModel(msgspec.Struct, frozen=True):
    """The model whose KV a store keeps.

    Args:
        name: the name by which clients call it; it enters the keys of session records.
        fingerprint: hex digest of weights, config, dtype and the engine's KV layout.
        needs_state: whether its cache cannot be cut back to an earlier token; sessions are then
            restorable only where a state was taken.
        windows: layers with sliding windows whose rows are stored as chunks beside states.
        window_tokens: tokens that these layers keep.
    """

    name: str
    fingerprint: str
    layout: KVLayout
    needs_state: bool = False
    windows: KVLayout | None = None
    window_tokens: int = 0


def tokens_in(run: KVRun) -> int:
    """Count the tokens of a run; 0 without layers."""
    return int(run[0][0].shape[1]) if len(run) else 0


def slice_tokens(run: KVRun, first: int, last: int) -> list[KVPair]:
    """Return views of tokens ``first..last`` of every layer; nothing is copied."""
    return [(k[:, first:last], v[:, first:last]) for k, v in run]


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rotation that a model applies to the first channels of every head of its keys.

    ``frequencies``: radians per token, one for each pair of channels. ``interleaved``: channel 2i
    is paired with 2i + 1, not channel i with i + len(frequencies). ``side``: "values" if the
    rotated keys lie in the place of values; left out of a file otherwise.
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False
    side: RotatedSide | UnsetType = UNSET

    @property
    def num_channels(self) -> int:
        """The number of channels that are rotated; they are the first ones of a head."""
        return 2 * len(self.frequencies)


@functools.lru_cache(maxsize=256)
def angle_tables(rope: Rope, first_token: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and sines of the angles of the tokens from ``first_token`` on.

    Both fp32 (num_tokens, num_channels / 2).
    """
    positions = np.arange(first_token, first_token + num_tokens, dtype=np.float64)
    angles = np.outer(positions, np.array(rope.frequencies, np.float64))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
