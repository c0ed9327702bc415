"""Packs and unpacks a session's KV, cut into chunks as the cold store cuts it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.blobs.format import HEADER_BYTES
from kvstore.codecs.base import Codec
from kvstore.cores import usable_cores
from kvstore.shapes import KVLayout, KVRun, slice_tokens


@dataclass(frozen=True)
class RoundTrip:
    """KV that was packed and unpacked, and the size that it had in between."""

    run: KVRun
    nbytes: int  # of all blobs, headers included
    num_elements: int

    @property
    def bits_per_element(self) -> float:
        return 8 * self.nbytes / self.num_elements


def round_trip(codec: Codec, run: KVRun, layout: KVLayout, chunk_tokens: int) -> RoundTrip:
    """Pack and unpack ``run`` as a sleep and a wake would, the last, shorter chunk as well."""
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
