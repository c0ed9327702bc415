"""Packs and unpacks a session's KV, cut into chunks as the cold store cuts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.blobs.format import HEADER_BYTES
from kvstore.codecs.base import Codec
from kvstore.cores import usable_cores
from kvstore.shapes import KVLayout, KVRun, slice_tokens
from kvstore.workers import default_threads


@dataclass(frozen=True)
class RoundTrip:
    """KV that was packed and unpacked, the size that it had in between, and the time back."""

    run: KVRun
    nbytes: int  # of all blobs, headers included
    num_elements: int
    restore_s: float  # of unpacking 1,000 tokens

    @property
    def bits_per_element(self) -> float:
        return 8 * self.nbytes / self.num_elements


def round_trip(
    codec: Codec,
    run: KVRun,
    layout: KVLayout,
    chunk_tokens: int,
    *,
    num_threads: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundTrip:
    """Pack and unpack ``run`` as a sleep and a wake would, the last, shorter chunk as well.

    Args:
        num_threads: that unpack, as many as the cold store has; 0 = its default.
    """
    num_tokens = run[0][0].shape[1]
    firsts = range(0, num_tokens, chunk_tokens)
    out = layout.empty(num_tokens)
    for array in (x for pair in out for x in pair):
        array.fill(0)  # memory that is touched first by the codec would count as its time

    def pack(first: int) -> memoryview:
        last = min(first + chunk_tokens, num_tokens)
        return memoryview(codec.encode(slice_tokens(run, first, last), layout, first))

    def unpack(first: int, payload: memoryview) -> None:
        last = min(first + chunk_tokens, num_tokens)
        codec.decode(payload, layout, first, slice_tokens(out, first, last))

    with ThreadPoolExecutor(usable_cores()) as pool:
        payloads = list(pool.map(pack, firsts))
    with ThreadPoolExecutor(num_threads or default_threads()) as pool:
        began = clock()
        list(pool.map(unpack, firsts, payloads))
        took = clock() - began
    return RoundTrip(
        run=out,
        nbytes=sum(HEADER_BYTES + len(x) for x in payloads),
        num_elements=layout.elements_per_token * num_tokens,
        restore_s=1000 * took / num_tokens,
    )
