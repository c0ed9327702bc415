"""RaBitQ: rotated keys by one sign each, and the factor that makes them fit.

Idea: keys without the chunk's mean (one cluster), rotated, point to the nearest corner of a cube.
Values here are TurboQuant's of 4 bits: RaBitQ says nothing about values.
Formula: k - mean is restored as f H^T sign(H (k - mean)), with the f of least squares.
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
