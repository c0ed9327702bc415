"""The pipeline of a fixed-rate preset with its integers, for kernels on other devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.fixed_rate.fused_rate import FusedRate
from kvstore.codecs.fixed_rate.rate_integers import RateIntegers
from kvstore.codecs.rope import Rope
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stages.octave_gain import OctaveGain
from kvstore.shapes import KVLayout


@dataclass(frozen=True, eq=False, kw_only=True)
class RatePipeline(Pipeline):
    """The stages of one stack, and the arrays from which they were made.

    ``means``: fp32 (elements of a token,), of keys without RoPE. ``ropes``: one for each layer,
    None for a layer without RoPE.
    """

    gain: OctaveGain
    integers: RateIntegers
    means: np.ndarray
    ropes: tuple[Rope | None, ...]


def rate_pipelines(codec: Codec, layout: KVLayout) -> tuple[RatePipeline, ...]:
    """Returns the pipeline of each stack of ``layout``; none unless ``codec`` has a fixed rate.

    Raises:
        UnknownCodec: the codec cannot encode this layout.
    """
    if not isinstance(codec, StackCodec):
        return ()
    parts = codec.assemble(layout)
    pipelines = [x.pipeline if isinstance(x, FusedRate) else x for x in parts]
    found = tuple(x for x in pipelines if isinstance(x, RatePipeline))
    return found if len(found) == len(parts) else ()
