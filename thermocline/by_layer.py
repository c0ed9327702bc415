"""A codec that packs each layer of a model with a method chosen for that layer.

payload: for each method, ordered by its first layer, u32 length and the payload of its layers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal, TypeAlias

import msgspec

from kvstore.codecs.base import Codec
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout, KVPair, KVRun
from thermocline import catalogue
from thermocline.method import Method
from thermocline.padded import PaddedCodec

DEFAULT: Final = "default"
ID_DIGITS: Final = 10
LENGTH_NBYTES: Final = 4
# A layer's number, from 0 on or from -1 backwards, or "default" for all others.
LayerName: TypeAlias = int | Literal["default"]


def per_layer(methods: Mapping[LayerName, str | Method]) -> Method:
    """Make a method that packs each layer of a model with the method chosen for that layer.

    ``methods``: a method, or its name, for each layer number (from 0 on, or from -1 backwards);
    "default" is for all other layers. Layers with the same method are packed together. A method
    that learned a model knows all of its layers, so it cannot be combined with others. To serve
    the result: ``register("mine", lambda: per_layer({...}).codec)``.

    Raises:
        UnknownCodec: there is no method with one of the names.
        ValueError: "default" is missing, or a key is neither "default" nor a number.
    """
    if DEFAULT not in methods:
        raise ValueError("per_layer needs a method for 'default'")
    codecs: dict[int, Codec] = {}
    default: Codec | None = None
    for layer, method in methods.items():
        if layer != DEFAULT and not isinstance(layer, int):
            raise ValueError(f"layer {layer!r} is neither a number nor 'default'")
        made = method if isinstance(method, Method) else catalogue.codec(method)
        padded = PaddedCodec(made.codec)  # each codec pads to the lengths that it takes itself
        if isinstance(layer, int):
            codecs[layer] = padded
        else:
            default = padded
    assert default is not None
    return Method(PerLayerCodec(default, tuple(sorted(codecs.items()))))


@dataclass(frozen=True)
class PerLayerCodec:
    """Packs each layer with the codec chosen for it. Implements ``Codec``."""

    default: Codec
    layers: tuple[tuple[int, Codec], ...]  # by the number of the layer; negative: from the end

    @property
    def id(self) -> str:
        named = f"{self.default.id} " + " ".join(f"{x}:{y.id}" for x, y in self.layers)
        return f"layers.1-{blake2b(named.encode(), digest_size=ID_DIGITS // 2).hexdigest()}"

    @property
    def exact(self) -> bool:
        return self.default.exact and all(x.exact for _, x in self.layers)

    def check(self, layout: KVLayout) -> None:
        for codec, part, _ in self._parts(layout):
            codec.check(part)

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return sum(
            LENGTH_NBYTES + codec.packed_nbytes(part, num_tokens, first_token)
            for codec, part, _ in self._parts(layout)
        )

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return sum(
            LENGTH_NBYTES + codec.least_nbytes(part, num_tokens, first_token)
            for codec, part, _ in self._parts(layout)
        )

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        chunks: list[bytes | memoryview] = []
        for codec, part, numbers in self._parts(layout):
            payload = codec.encode([run[x] for x in numbers], part, first_token)
            chunks += [count_bytes(len(payload)), payload]
        return b"".join(chunks)

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        reader = Reader(payload)
        for codec, part, numbers in self._parts(layout):
            own = reader.take("u1", reader.count(len(payload)))
            pairs: list[KVPair] = [out[x] for x in numbers]
            codec.decode(own.data, part, first_token, pairs)
        reader.expect_end()

    def _parts(self, layout: KVLayout) -> list[tuple[Codec, KVLayout, list[int]]]:
        """Return each codec with the layout and the numbers of the layers that it packs.

        Raises:
            UnknownCodec: a layer number is beyond the model's last layer.
        """
        count = len(layout.layers)
        named = [x for x, _ in self.layers if not -count <= x < count]
        if named:
            raise UnknownCodec(f"layer {named[0]} is named, and there are {count}")
        chosen = [self.default] * count
        for layer, codec in self.layers:
            chosen[layer] = codec
        numbers: dict[str, list[int]] = {}
        for number, codec in enumerate(chosen):
            numbers.setdefault(codec.id, []).append(number)
        found = []
        for own in numbers.values():
            layers = tuple(layout.layers[x] for x in own)
            found.append((chosen[own[0]], msgspec.structs.replace(layout, layers=layers), own))
        return found
