"""A codec made of stages; see ``pipeline`` for their order.

    payload: exact first tokens (16-bit values, array by array), then each stack's chunk

The first four tokens of a session are stored unquantised: attention gives them far more weight than
any other token, and without them every codec that removes means collapses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kvstore.codecs import floats
from kvstore.codecs.base import check_run, decode_each, num_sinks
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.pipeline import StackPacker
from kvstore.shapes import KVLayer, KVLayout, KVRun

WHOLE_TOKENS: Final = 32  # chunks of multiples of it are unpacked together: whole vectors of lanes

# Makes one packer for each stack of a layout, the same objects every time.
Assemble: TypeAlias = Callable[[KVLayout], Sequence[StackPacker]]


@dataclass(frozen=True)
class StackCodec:
    """Packs a run stack by stack. Implements ``kvstore.codecs.base.Codec``."""

    id: str
    # Raises UnknownCodec for a layout that it does not accept.
    assemble: Assemble = field(compare=False, repr=False)
    exact: bool = False
    # The fewest bits of a value of K and of V, of a codec that packs any heads, each by itself.
    # None: there are packers for one layout only, which are made already.
    least_bits: tuple[float, float] | None = None

    def check(self, layout: KVLayout) -> None:
        self.assemble(layout if self.least_bits is None else one_head_each(layout))

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        sinks = num_sinks(num_tokens, first_token)
        exact = 2 * sinks * layout.elements_per_token
        rest = num_tokens - sinks
        return exact + sum(x.nbytes(rest) for x in self.assemble(layout) if rest)

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        sinks = num_sinks(num_tokens, first_token)
        exact, rest = 2 * sinks * layout.elements_per_token, num_tokens - sinks
        if self.least_bits is None:
            return exact + sum(x.least_nbytes(rest) for x in self.assemble(layout))
        layers, (of_key, of_value) = layout.layers, self.least_bits
        bits = sum(x.num_kv_heads * (x.head_dim * of_key + x.value_dim * of_value) for x in layers)
        # Of each head there is a byte at least.
        heads = sum(x.num_kv_heads * ((x.head_dim > 0) + (x.value_dim > 0)) for x in layers)
        return exact + (max(heads, int(rest * bits / 8)) if rest else 0)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        num_tokens = check_run(run, layout)
        sinks = num_sinks(num_tokens, first_token)
        arrays = [array for pair in run for array in pair]
        chunks = [floats.to_stored(x[:, :sinks], layout.dtype).tobytes() for x in arrays if sinks]
        if num_tokens > sinks:
            for part in self.assemble(layout):
                chunks.append(part.encode(run, sinks, first_token + sinks, layout.dtype))
        return b"".join(chunks)

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        num_tokens = check_run(out, layout)
        sinks = num_sinks(num_tokens, first_token)
        reader = Reader(payload)
        for array in (x for pair in out for x in pair if sinks):
            stored = reader.take("<u2", array.shape[0], sinks, array.shape[2])
            array[:, :sinks] = floats.from_stored(stored, layout.dtype)
        for part in self.assemble(layout) if num_tokens > sinks else ():
            part.decode([reader], out, sinks, first_token + sinks, layout.dtype)
        reader.expect_end()

    def decode_chunks(
        self, payloads: Sequence[memoryview], layout: KVLayout, first_token: int, out: KVRun
    ) -> None:
        """Implement ``ChunksCodec``: matrices, which are larger than the cache, are read once."""
        if check_run(out, layout) // len(payloads) % WHOLE_TOKENS:
            return decode_each(self, payloads, layout, first_token, out)
        readers = [Reader(payload) for payload in payloads]
        for part in self.assemble(layout):
            part.decode(readers, out, 0, first_token, layout.dtype)
        for reader in readers:
            reader.expect_end()


def one_head_each(layout: KVLayout) -> KVLayout:
    """Return a layout with one head for each kind of head in ``layout``."""
    kinds = dict.fromkeys(KVLayer(1, x.head_dim, x.value_dim) for x in layout.layers)
    return KVLayout(layout.dtype, tuple(kinds))
