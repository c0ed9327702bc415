"""What a profile is learned from: the KV of some texts, and how much each head matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.payload import NUM_SINKS
from kvstore.codecs.pieces.rope import Rope, UnRope
from kvstore.codecs.stacks import StackShape
from kvstore.shapes import KVLayout, KVRun


@dataclass(frozen=True)
class Samples:
    """``texts``: KV of several texts, each from its first token on, as an engine holds it.

    ``sensitivities``: fp32, one for each head of K and of V (layer by layer, K then V): the root
    mean square of how fast the loss on *later* tokens moves per relative error in a stored vector.
    None: all matter alike.
    """

    layout: KVLayout
    ropes: tuple[Rope | None, ...]
    texts: Sequence[KVRun]
    sensitivities: np.ndarray | None = None

    def stack(self, shape: StackShape, text: KVRun) -> np.ndarray:
        """fp32 (units, tokens, width) of one text behind its sinks, keys without RoPE."""
        stack = shape.gather(text, NUM_SINKS, self.layout.dtype)
        turned, _ = UnRope(shape, self.ropes).forward(stack, NUM_SINKS)
        return turned

    def weights(self, shape: StackShape) -> np.ndarray:
        """fp32 (units, width): each head's sensitivity in all of its columns."""
        if self.sensitivities is None:
            return np.ones((shape.num_units, shape.width), np.float32)
        of_element = np.repeat(self.sensitivities, _head_dims(self.layout))
        floor = of_element.max() * 1e-3  # a head that never matters is still kept
        weights: np.ndarray = np.maximum(of_element, floor).astype(np.float32)[shape.elements]
        return weights


def _head_dims(layout: KVLayout) -> list[int]:
    return [
        dim
        for layer in layout.layers
        for dim in (layer.head_dim, layer.value_dim)
        for _ in range(layer.num_kv_heads)
    ]
