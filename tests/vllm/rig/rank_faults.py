"""``FaultyRaw`` whose faults strike one rank of several only, as real ones do.

``fail``: chunks that this rank cannot decode. ``break``: chunks that it cannot even encode.
"""

from __future__ import annotations

import torch

from kvstore.codecs.base import RawCodec
from kvstore.shapes import KVLayout, KVRun
from tests.vllm.rig.faulty_codec import FaultyRaw, tokens_named

UNLUCKY_RANK = 1


class OneRankFaulty(FaultyRaw):
    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        codec = FaultyRaw if _is_unlucky() else RawCodec
        codec.decode(self, payload, layout, first_token, out)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        if _is_unlucky() and first_token in tokens_named("break"):
            raise RuntimeError("a fault that the test asked for")
        return super().encode(run, layout, first_token)


def _is_unlucky() -> bool:
    return torch.distributed.get_rank() == UNLUCKY_RANK
