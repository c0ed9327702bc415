"""RaBitQ: rotated keys as one sign per value, and a factor that fits them.

Idea: keys without the chunk's mean (one cluster) are rotated; each is replaced by the nearest
corner of a cube. Values are TurboQuant's with 4 bits here, because RaBitQ does not cover values.
Formula: k - mean is restored as f H^T sign(H (k - mean)), with the least-squares f.
Size: keys 1 + 16 / D + 16 / 128 bits, both together 2.5 + 16 / D bits and the mean.
Paper: RaBitQ, SIGMOD 2024, arXiv 2405.12497.
"""

from __future__ import annotations

import dataclasses
import functools

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines, equal_bits
from kvstore.codecs.literature.stages.rotated import rotated, rotated_levels
from kvstore.codecs.literature.stages.sign import Sign
from kvstore.codecs.stacks.pipeline import Pipeline
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.mean import ChunkMean


def rabitq() -> Codec:
    """Makes the preset ``rabitq``."""
    values = functools.partial(rotated_levels, num_bits=4)
    return StackCodec("rabitq.1", HeadPipelines(_signs, values))


def _signs(shape: StackShape) -> Pipeline:
    signs = rotated(shape, Sign(), equal_bits(shape, 1), is_fitted=True)
    return dataclasses.replace(signs, before=(ChunkMean(shape),))
