"""turboQuantPlayground: rotated keys of 3 bits, values in groups of 32 with 2 bits.

Idea: keys need the rotation, values do without. Its buffer of recent tokens kept as they are is
this store's raw tail: the tokens behind the last whole chunk, 0 to 127 of them.
Formula: keys as in ``turbo_quant``, values as in ``kivi``.
Size: keys 3 + 16 / D bits, values 3 bits.
Project: turboQuantPlayground, after TurboQuant (arXiv 2504.19874) and KIVI (arXiv 2402.02750).
"""

from __future__ import annotations

import functools

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines
from kvstore.codecs.literature.stages.min_max import grouped
from kvstore.codecs.literature.stages.rotated import rotated_levels
from kvstore.codecs.stacks.stack_codec import StackCodec


def playground() -> Codec:
    """Makes the preset ``playground``."""
    keys = functools.partial(rotated_levels, num_bits=3)
    values = functools.partial(grouped, bits=2, along="width")
    return StackCodec("playground.1", HeadPipelines(keys, values))
