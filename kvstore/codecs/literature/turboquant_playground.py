"""turboQuantPlayground: rotated keys of 3 bits, values in groups of 32 with 2 bits.

Idea: keys need the rotation, values do not. Its buffer of recent unquantised tokens corresponds to
this store's raw tail: the tokens after the last whole chunk, 0 to 127 of them.
Formula: keys as in ``turbo_quant``, values as in ``kivi``.
Size: keys 3 + 16 / D bits, values 3 bits, unless parameters change them.
Project: turboQuantPlayground, after TurboQuant (arXiv 2504.19874) and KIVI (arXiv 2402.02750).
"""

from __future__ import annotations

import functools

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines
from kvstore.codecs.literature.stages.min_max import GROUP, grouped
from kvstore.codecs.literature.stages.rotated import rotated_levels
from kvstore.codecs.stacks.stack_codec import StackCodec


def playground(key_bits: int = 3, value_bits: int = 2, group: int = GROUP) -> Codec:
    """Makes the preset ``playground``."""
    keys = functools.partial(rotated_levels, num_bits=key_bits)
    values = functools.partial(grouped, bits=value_bits, along="width", group=group)
    return StackCodec(
        "playground.1", HeadPipelines(keys, values), least_bits=(key_bits, value_bits)
    )
