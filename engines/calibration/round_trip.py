"""A session's KV through a codec and back, cut into chunks as the cold store cuts it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.codecs.base import Codec
from kvstore.cores import usable_cores
from kvstore.format import HEADER_BYTES
from kvstore.shapes import KVLayout, KVRun, slice_tokens


@dataclass(frozen=True)
class RoundTrip:
    run: KVRun
    nbytes: int  # of all blobs, headers included
    num_elements: int

    @property
    def bits_per_element(self) -> float:
        return 8 * self.nbytes / self.num_elements


def round_trip(codec: Codec, run: KVRun, layout: KVLayout, chunk_tokens: int) -> RoundTrip:
    """What a wake would bring back of ``run``, were its last chunk full, too."""
    num_tokens = run[0][0].shape[1]
    out = layout.empty(num_tokens)

    def nbytes_of(first: int) -> int:
        last = min(first + chunk_tokens, num_tokens)
        payload = codec.encode(slice_tokens(run, first, last), layout, first)
        codec.decode(memoryview(payload), layout, first, slice_tokens(out, first, last))
        return HEADER_BYTES + len(payload)

    with ThreadPoolExecutor(usable_cores()) as pool:
        nbytes = sum(pool.map(nbytes_of, range(0, num_tokens, chunk_tokens)))
    return RoundTrip(out, nbytes, layout.elements_per_token * num_tokens)
