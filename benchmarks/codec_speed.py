"""Measures a codec's GB/s beside memcpy of the same bf16 bytes, in one process.

    python -m benchmarks.codec_speed [--codec tq3] [--dims 64 128 256] [--seconds 3] [--json OUT]
    python -m benchmarks.codec_speed --profile FILE --codec dense3 balanced max

Each step packs or restores 128 tokens of all layers of a small model with that head dimension, as
whole payloads: four of the store's chunks. Learned presets need a model's profile (``thermocline
calibrate`` writes one), and pack KV that the sample model computes from a held-out text (a minute);
its chunks, all but the first, are repeated at their own places. The candidates take turns on data
that is cold in the cache, and the best round of each counts, in processor time of each thread: on a
shared machine only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.density import model_run
from benchmarks.families.fast_blas import begin_with_blas
from benchmarks.program import arguments, write_json
from kvstore.codecs.base import Codec
from kvstore.codecs.floats import round_to_bf16
from kvstore.codecs.presets import codec_by_name, open_codec, warm
from kvstore.codecs.profile import load_profile
from kvstore.shapes import KVLayer, KVLayout, KVRun, slice_tokens

# KV heads and layers by head dimension: of SmolLM2-135M, H2O-Danube-1.8B, Phi-3-mini, a part of
# MPT-30B, Qwen2.5-1.5B, DeepSeek-V2-Lite's keys, Gemma-3-1B and DeepSeek-V2-Lite's latents.
MODELS = {64: (3, 30), 80: (8, 24), 96: (32, 32), 112: (8, 24), 128: (2, 28)}
MODELS |= {192: (16, 27), 256: (1, 26), 576: (1, 27)}
HELD_OUT_TOKENS = 1408
CHUNK_TOKENS = 128
PAST_SINKS = 1 << 20
WORKING_SET_BYTES = 200 << 20  # far beyond any last-level cache share


@dataclass
class Candidate:
    what: str
    work: Callable[[int], None]  # on slice number
    best_s: float = field(default=float("inf"))

    def run(self, slices: range, pool: ThreadPoolExecutor | None) -> None:
        begun, num_threads = time.process_time(), 1
        if pool is None:
            for number in slices:
                self.work(number)
        else:
            num_threads = pool._max_workers
            list(pool.map(self.work, slices))
        spent = (time.process_time() - begun) / num_threads
        self.best_s = min(self.best_s, spent / len(slices))


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Return a uint16 array that begins at a cache line, as engines allocate."""
    nbytes = 2 * int(np.prod(shape))
    raw = np.ones(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(np.uint16).reshape(shape)


def uneven_rows(num_rows: int, dim: int) -> np.ndarray:
    """Return bf16 rows whose channels differ in size: a short sample, repeated."""
    rng = np.random.default_rng(0)
    sample = rng.standard_normal((4096, dim)) * rng.lognormal(0, 1, dim)
    rows = aligned((num_rows, dim))
    rows[:] = np.resize(round_to_bf16(sample.astype(np.float32)), rows.shape)
    return rows


class Slices:
    """Slices of one chunk's rows each, with their bf16 sources, targets and payloads."""

    def __init__(self, codec: Codec, layout: KVLayout, kv: np.ndarray | None = None):
        """``kv``: uint16 (layers, 2, heads, tokens, head_dim); random unless given."""
        self.codec, self.layout = codec, layout
        self.num_heads, self.dim = layout.layers[0].num_kv_heads, layout.layers[0].head_dim
        num_arrays = 2 * self.num_heads * len(layout.layers)
        self.num_rows = num_arrays * CHUNK_TOKENS
        self.count = WORKING_SET_BYTES // (self.num_rows * self.dim * 2) // 4 * 4
        self.source = uneven_rows(self.count * self.num_rows, self.dim)
        self.places = [PAST_SINKS] * self.count
        if kv is not None:
            period = kv.shape[3] // CHUNK_TOKENS * CHUNK_TOKENS - CHUNK_TOKENS
            tokens = CHUNK_TOKENS + np.arange(self.count * CHUNK_TOKENS) % period
            self.source[:] = kv[:, :, :, tokens].reshape(self.source.shape)
            self.places = tokens[::CHUNK_TOKENS].tolist()
        self.target = aligned(self.source.shape)
        warm(self.codec, self.layout)
        self.whole, self.restored = self._as_run(self.source), self._as_run(self.target)
        self.payloads: list[bytes | bytearray | memoryview] = [b""] * self.count
        for number in range(self.count):
            self.encode_chunk(number)

    def _as_run(self, rows: np.ndarray) -> KVRun:
        shape = (-1, 2, self.num_heads, self.count * CHUNK_TOKENS, self.dim)
        return [(pair[0], pair[1]) for pair in rows.reshape(shape)]

    def _part(self, rows: np.ndarray, number: int) -> np.ndarray:
        return rows[number * self.num_rows : (number + 1) * self.num_rows]

    def copy(self, number: int) -> None:
        source, target = self._part(self.source, number), self._part(self.target, number)
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)

    def encode_chunk(self, number: int) -> None:
        run = slice_tokens(self.whole, number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
        self.payloads[number] = self.codec.encode(run, self.layout, self.places[number])

    def decode_chunk(self, number: int) -> None:
        out = slice_tokens(self.restored, number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
        payload = memoryview(self.payloads[number])
        self.codec.decode(payload, self.layout, self.places[number], out)

    @property
    def bits(self) -> float:
        """The bits that a value takes, over all chunks."""
        return 8 * sum(map(len, self.payloads)) / (self.count * self.num_rows * self.dim)


def measure(slices: Slices, threads: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Run all candidates in turns, each on the next slices, until the time is up; yield figures."""
    works = {"memcpy": slices.copy, "pack": slices.encode_chunk, "restore": slices.decode_chunk}
    found = [Candidate(what, work) for what, work in works.items()]
    deadline, number = time.perf_counter() + seconds, 0
    with ThreadPoolExecutor(threads) as pool:
        while time.perf_counter() < deadline:
            for candidate in found:
                turn = range(number, number + 2 * threads)
                candidate.run(turn, pool if threads > 1 else None)
            number = (number + 2 * threads) % slices.count
    nbytes = 2 * slices.num_rows * slices.dim
    for x in found:
        yield {
            "codec": slices.codec.id,
            "dim": slices.dim,
            "threads": threads,
            "what": x.what,
            "gb_per_s": round(nbytes / x.best_s / 1e9, 3),
            "x_memcpy": round(found[0].best_s / x.best_s, 3),
        }


def all_slices(args: argparse.Namespace) -> Iterator[Slices]:
    """Yield the slices of each codec and dimension, one after another: each takes gigabytes."""
    if args.profile is None:
        for name in args.codec:
            for dim in args.dims:
                num_heads, num_layers = MODELS[dim]
                layers = (KVLayer(num_heads, dim, dim),) * num_layers
                yield Slices(codec_by_name(name), KVLayout("bfloat16", layers))
        return
    begin_with_blas("benchmarks.codec_speed")
    profile = load_profile(args.profile)
    layout, run = model_run(None, HELD_OUT_TOKENS)
    kv: np.ndarray = np.array(run)
    if layout.dtype == "float32":  # as CPUs serve the sample model
        layout = replace(layout, dtype="bfloat16")
        kv = round_to_bf16(kv)
    for name in args.codec:
        yield Slices(open_codec(name, profile), layout, kv)


def main() -> None:
    dims = " ".join(map(str, MODELS))
    args = arguments(
        __doc__, f"--codec tq3 ... --dims {dims} --profile PATH --threads 1 2 --seconds 3.0"
    )
    rates: list[dict[str, Any]] = []
    for slices in all_slices(args):
        print(f"{slices.codec.id}, {slices.dim} wide: {slices.bits:.3f} bits", flush=True)
        for threads in args.threads:
            rates += measure(slices, threads, args.seconds)
    write_json(args.json, rates)


if __name__ == "__main__":
    main()
