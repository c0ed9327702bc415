"""The pipelines of a fixed-rate preset, and the layout of its payload, for other devices' kernels.

    sink rows | for each stack: kept rows (how many, which, values) | gains | planes

Kept rows are those stored unquantised. Nearly always there are none; then layout and number of
tokens determine every offset. Such a payload is called *plain* here: its counts of kept rows are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.base import Codec, num_sinks
from kvstore.codecs.fixed_rate.fused_rate import FusedRate
from kvstore.codecs.fixed_rate.fused_rate import RatePipeline as RatePipeline
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stages.gain import pairs_of
from kvstore.shapes import KVLayout

COUNT_BYTES = 4  # the size of a count of kept rows


def rate_pipelines(codec: Codec, layout: KVLayout) -> tuple[RatePipeline, ...]:
    """Return the pipeline of each stack of ``layout``; none unless ``codec`` has a fixed rate.

    Raises:
        UnknownCodec: the codec cannot encode this layout.
    """
    if not isinstance(codec, StackCodec):
        return ()
    parts = codec.assemble(layout)
    pipelines = [x.pipeline if isinstance(x, FusedRate) else x for x in parts]
    found = tuple(x for x in pipelines if isinstance(x, RatePipeline))
    return found if len(found) == len(parts) else ()


@dataclass(frozen=True)
class StackPlace:
    """The byte offsets of one stack in a plain payload: from its count of kept rows to its end."""

    count_at: int
    pairs_at: int
    planes_at: int
    end: int


@dataclass(frozen=True, eq=False)
class Kept:
    """The kept rows of one stack, which are stored unquantised.

    ``numbers``: int64 (rows,), ascending: unit times number of tokens after the sinks plus token.
    ``values``: uint16 (rows, width), bit patterns.
    """

    numbers: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class RatePayload:
    """The places of the parts of one payload.

    ``num_tokens``: the tokens after the sinks. ``sinks_at``: byte offsets of the sink rows of K and
    V of the first layer, of the second, ... ``nbytes``: the length of a plain payload.
    """

    pipelines: Sequence[RatePipeline]
    num_sinks: int
    num_tokens: int
    sinks_at: tuple[int, ...]
    stacks: tuple[StackPlace, ...]
    nbytes: int

    def join(self, plain: np.ndarray, kept: Sequence[Kept]) -> bytes:
        """Return the payload of a plain one, uint8 (nbytes,), and the kept rows of each stack."""
        parts: list[bytes | memoryview] = [plain[: self._sinks_end].data]
        for place, some in zip(self.stacks, kept, strict=True):
            numbers = some.numbers.astype("<u4").tobytes()
            parts += [count_bytes(len(some.numbers)), numbers, some.values.astype("<u2").tobytes()]
            parts.append(plain[place.pairs_at : place.end].data)
        return b"".join(parts)

    def split(self, payload: memoryview, plain: np.ndarray) -> list[Kept]:
        """Split a payload: fill ``plain``, uint8 (nbytes,), and return each stack's kept rows.

        Raises:
            Corrupt: the payload is too short or too long, or its kept rows are out of order.
        """
        reader, kept = Reader(payload), []
        plain[: self._sinks_end] = reader.take("u1", self._sinks_end)
        for place, pipeline in zip(self.stacks, self.pipelines, strict=True):
            numbers, exact = pipeline.read_kept(reader, self.num_tokens)
            kept.append(Kept(numbers, exact.reshape(-1, pipeline.shape.width)))
            plain[place.count_at : place.pairs_at] = 0
            part = reader.take("u1", place.end - place.pairs_at)
            plain[place.pairs_at : place.end] = part
        reader.expect_end()
        return kept

    @property
    def _sinks_end(self) -> int:
        return self.stacks[0].count_at if self.stacks else self.nbytes


def plan_rates(
    pipelines: Sequence[RatePipeline], layout: KVLayout, num_tokens: int, first_token: int
) -> RatePayload:
    """Return the plan of a payload of ``num_tokens`` tokens, from ``first_token`` on."""
    sinks = num_sinks(num_tokens, first_token)
    sinks_at, at = [], 0
    for layer in layout.layers:
        for dim in (layer.head_dim, layer.value_dim):
            sinks_at.append(at)
            at += 2 * layer.num_kv_heads * sinks * dim
    num_rest, places = num_tokens - sinks, []
    for pipeline in pipelines if num_rest else ():
        planes_at = at + COUNT_BYTES + pipeline.shape.num_units * pairs_of(num_rest)
        end = planes_at + pipeline.coder.nbytes(num_rest)
        places.append(StackPlace(at, at + COUNT_BYTES, planes_at, end))
        at = end
    used = tuple(pipelines) if num_rest else ()
    return RatePayload(used, sinks, num_rest, tuple(sinks_at), tuple(places), at)
