"""KIVI: groups of 32 with 2 bits, keys by channel, values by token.

Idea: channels of keys differ in size, and so do tokens of values; each is grouped along the axis on
which sizes are even.
Formula: code = round((x - smallest) / step), with fp16 smallest and step for each group.
Size: 3 bits, including the two numbers of a group; b + 32 / group bits with other parameters.
Paper: KIVI, arXiv 2402.02750.
"""

from __future__ import annotations

import functools

from kvstore.codecs.base import Codec
from kvstore.codecs.literature.stages.head_pipelines import HeadPipelines
from kvstore.codecs.literature.stages.min_max import GROUP, grouped
from kvstore.codecs.stacks.stack_codec import StackCodec


def kivi(bits: int = 2, group: int = GROUP) -> Codec:
    """Makes the preset ``kivi``."""
    keys = functools.partial(grouped, bits=bits, along="tokens", group=group)
    values = functools.partial(grouped, bits=bits, along="width", group=group)
    return StackCodec("kivi.1", HeadPipelines(keys, values), least_bits=(bits, bits))
