"""Rows per second of a codec beside memcpy of the same bf16 bytes, in one process.

    python -m benchmarks.codec_speed [--codec tq3] [--dims 64 128 256] [--seconds 3] [--json OUT]
    python -m benchmarks.codec_speed --learn FOLDER [--codec balanced] [--dims 64 128] ...

*kernel* is two long arrays; *chunk* is 128 tokens of all layers of a small model with that head
dimension, payload and all: four of the store's chunks. *seed* is the obvious numpy (normalise,
search the nearest of eight levels, pack bits). Learned presets know a model: KV of the sample
model, which mlx computes once (minutes), is joined and cut to heads of each dimension, and each
preset learns from it once (minutes for ``max``); FOLDER keeps both. The chunks of a held-out text,
all but the first, are repeated at their own places. The candidates take turns on data that is cold
in the cache, and the best round of each counts, in processor time of each thread: on a shared
machine only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.calibrated import learn_profile
from kvstore.codecs.floats import round_to_bf16, widen
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.names import CALIBRATED
from kvstore.codecs.presets import codec_by_name, open_codec, warm
from kvstore.codecs.profile import Profile, load_profile
from kvstore.codecs.rows.backend import ArrayKernel, best_kernel
from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.shapes import KVLayer, KVLayout, KVRun, Rope, angle_tables, slice_tokens

# KV heads and layers by head dimension: of SmolLM2-135M, H2O-Danube-1.8B, Phi-3-mini, a part of
# MPT-30B, Qwen2.5-1.5B, DeepSeek-V2-Lite's keys, Gemma-3-1B and DeepSeek-V2-Lite's latents.
MODELS = {64: (3, 30), 80: (8, 24), 96: (32, 32), 112: (8, 24), 128: (2, 28)}
MODELS |= {192: (16, 27), 256: (1, 26), 576: (1, 27)}
# Heads and layers that are made of the sample model's channels, with about as many in a layer.
MADE = {64: (3, 30), 80: (2, 30), 96: (2, 30), 112: (2, 20), 128: (2, 20), 192: (1, 30)}
MADE |= {256: (1, 20)}
NUM_TEXTS, TEXT_TOKENS, HELD_OUT_TOKENS = 4, 1024, 1408
ROPE_BASE = 1e5
CHUNK_TOKENS = 128
PAST_SINKS = 1 << 20
WORKING_SET_BYTES = 200 << 20  # far beyond any last-level cache share
SEED_ROWS = 1024


@dataclass(frozen=True)
class Rate:
    codec: str
    dim: int
    threads: int
    what: str
    mrows_per_s: float
    x_memcpy: float
    x_seed: float | None


@dataclass
class Candidate:
    what: str
    num_rows: int  # of one call
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

    @property
    def rate(self) -> float:
        return self.num_rows / self.best_s / 1e6


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """uint16, at a multiple of a cache line as engines allocate."""
    nbytes = 2 * int(np.prod(shape))
    raw = np.ones(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(np.uint16).reshape(shape)


def uneven_rows(num_rows: int, dim: int) -> np.ndarray:
    """bf16 rows whose channels differ in size; a short sample, repeated."""
    rng = np.random.default_rng(0)
    sample = rng.standard_normal((4096, dim)) * rng.lognormal(0, 1, dim)
    rows = aligned((num_rows, dim))
    rows[:] = np.resize(round_to_bf16(sample.astype(np.float32)), rows.shape)
    return rows


def captured(path: Path) -> tuple[np.ndarray, ...]:
    """KV of the sample model, and how errors in each head matter; computed unless in the file.

    Texts are uint16 (texts, layers, 2, heads, tokens, dim), the first is held out and longer.
    """
    if not path.exists():
        import mlx.core as mx
        import mlx_lm

        import thermocline.mlx
        from engines.calibration.corpus import fit_texts, held_out_texts
        from launch.machine.folders import default_cache_dir
        from launch.model.sample import sample_model

        model, tokenizer, *_ = mlx_lm.load(str(sample_model(default_cache_dir(os.environ))))
        model.set_dtype(mx.float32)
        encoded = (tokenizer.encode(x.content)[:TEXT_TOKENS] for x in fit_texts())
        texts = [x for x in encoded if len(x) == TEXT_TOKENS][:NUM_TEXTS]
        samples = thermocline.mlx.capture(model, texts, progress=True)
        held_out = max((tokenizer.encode(x.content) for x in held_out_texts()), key=len)
        run = thermocline.mlx.instrument(model).prefill(held_out[:HELD_OUT_TOKENS]).run
        stacked = [round_to_bf16(np.array(x, np.float32)) for x in (run, *samples.texts)]
        assert samples.metrics is not None
        np.savez(path, held=stacked[0], texts=stacked[1:], metrics=samples.metrics)
    with np.load(path) as found:
        return tuple(found[name] for name in ("held", "texts", "metrics"))


def rope_of(dim: int) -> Rope:
    """The turns of a head's keys, as the sample model has them for 64 channels."""
    return Rope(tuple((ROPE_BASE ** (-np.arange(0, dim, 2) / dim)).tolist()))


def turned(keys: np.ndarray, direction: int) -> np.ndarray:
    """Keys, fp32 (..., tokens, dim), turned by their positions, or back."""
    cos, sin = angle_tables(rope_of(keys.shape[-1]), 0, keys.shape[-2])
    first, second = np.split(keys, 2, axis=-1)
    sin = direction * sin
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def made_of(kv: np.ndarray, dim: int) -> np.ndarray:
    """The same channels as heads of another dimension; keys are turned as such heads' are."""
    num_heads, num_layers = MADE[dim]
    values = widen(kv, "bfloat16")
    values[:, 0] = turned(values[:, 0], -1)
    channels = values.transpose(1, 0, 2, 4, 3).reshape(2, -1, kv.shape[3])
    chosen = channels[:, : num_layers * num_heads * dim]
    heads = chosen.reshape(2, num_layers, num_heads, dim, -1).transpose(1, 0, 2, 4, 3)
    heads = np.ascontiguousarray(heads)
    heads[:, 0] = turned(heads[:, 0], 1)
    return round_to_bf16(heads)


def metrics_of(metrics: np.ndarray, dim: int) -> list[np.ndarray]:
    """The metrics of heads of another dimension: layer by layer, K then V."""
    num_heads, num_layers = MADE[dim]
    sides = metrics.reshape(-1, 2, *MADE[64][:1], *metrics.shape[1:])
    found = []
    for first in range(0, num_layers * num_heads, num_heads):
        for side in range(2):
            own = sides[:, side].reshape(-1, *metrics.shape[1:])
            found += [_block(own, dim * number, dim) for number in range(first, first + num_heads)]
    return found


def _block(metrics: np.ndarray, first: int, dim: int) -> np.ndarray:
    """Some channels of the matrix whose diagonal has all ``metrics``."""
    block = np.zeros((dim, dim), np.float32)
    size = metrics.shape[1]
    for number in range(first // size, (first + dim - 1) // size + 1):
        low, high = max(first, number * size), min(first + dim, (number + 1) * size)
        own = slice(low - first, high - first), slice(low - number * size, high - number * size)
        block[own[0], own[0]] = metrics[number][own[1], own[1]]
    return block


def learned(folder: Path, name: str, dim: int, known: tuple[np.ndarray, ...]) -> Profile:
    """What a preset learned from heads of that dimension; learned unless in the folder."""
    path = folder / f"{name}-{dim}.profile"
    if not path.exists():
        num_heads, num_layers = MADE[dim]
        layout = KVLayout("bfloat16", (KVLayer(num_heads, dim, dim),) * num_layers)
        texts = [[(k, v) for k, v in made_of(text, dim)] for text in known[1][:NUM_TEXTS]]
        ropes = (rope_of(dim),) * num_layers
        samples = Samples(layout, ropes, texts, metrics_of(known[2], dim))
        learn_profile(samples, "made", [name]).save(path)
    return load_profile(path)


class Slices:
    """Many slices of one chunk's rows each: bf16 source, target, payloads."""

    def __init__(self, codec: Codec, layout: KVLayout, kv: np.ndarray | None = None):
        """``kv``: uint16 (layers, 2, heads, tokens, head_dim); made up unless given."""
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
        self.kernel: ArrayKernel | None = None
        if isinstance(codec, RowCodec):
            self._prepare_kernel(codec)
        self._prepare_chunks()

    def _prepare_kernel(self, codec: RowCodec) -> None:
        flat = KVLayout("bfloat16", (KVLayer(1, self.dim, self.dim),))
        plan = plan_payload(codec.rows, flat, self.num_rows // 2, PAST_SINKS)
        self.group = plan.groups[0]
        self.kernel = best_kernel(codec.rows, self.dim, "bfloat16")
        self.packed = np.ones((self.count, plan.nbytes), np.uint8)

    def _prepare_chunks(self) -> None:
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

    def _halves(self, rows: np.ndarray, number: int) -> list[np.ndarray]:
        """The run as one long K and one long V, each (1, num_tokens, dim)."""
        return list(self._part(rows, number).reshape(2, 1, -1, self.dim))

    def copy(self, number: int) -> None:
        source, target = self._part(self.source, number), self._part(self.target, number)
        ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)

    def encode(self, number: int) -> None:
        assert self.kernel is not None
        self.kernel.pack(self._halves(self.source, number), self.packed[number], self.group)

    def decode(self, number: int) -> None:
        assert self.kernel is not None
        self.kernel.unpack([self.packed[number]], self.group, self._halves(self.target, number))

    def encode_chunk(self, number: int) -> None:
        run = slice_tokens(self.whole, number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
        self.payloads[number] = self.codec.encode(run, self.layout, self.places[number])

    def decode_chunk(self, number: int) -> None:
        out = slice_tokens(self.restored, number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
        payload = memoryview(self.payloads[number])
        self.codec.decode(payload, self.layout, self.places[number], out)

    @property
    def bits(self) -> float:
        """Bits of a value, over all chunks."""
        return 8 * sum(map(len, self.payloads)) / (self.count * self.num_rows * self.dim)


def seed_encode(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x = widen(rows, "bfloat16")
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    z = x * np.sqrt(x.shape[1]) / np.maximum(norms, 1e-12)
    codes = np.searchsorted(SEED_BOUNDS, z).astype(np.uint8)
    bits = (codes[:, :, None] >> np.arange(3, dtype=np.uint8)) & 1
    return np.packbits(bits.reshape(len(rows), -1), axis=1, bitorder="little"), norms


def seed_decode(packed: np.ndarray, norms: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, 3)
    z = SEED_LEVELS[(bits * np.array([1, 2, 4], np.uint8)).sum(-1)]
    return round_to_bf16((z * norms / np.sqrt(z.shape[1])).astype(np.float32))


SEED_LEVELS = np.array([-2.152, -1.344, -0.756, -0.245, 0.245, 0.756, 1.344, 2.152])
SEED_BOUNDS = (SEED_LEVELS[1:] + SEED_LEVELS[:-1]) / 2


def candidates(slices: Slices) -> list[Candidate]:
    rows = slices.num_rows
    kernels = [
        Candidate("encode, kernel", rows, slices.encode),
        Candidate("decode, kernel", rows, slices.decode),
    ]
    return [
        Candidate("memcpy", rows, slices.copy),
        *(kernels if slices.kernel else []),
        Candidate("encode, chunk", rows, slices.encode_chunk),
        Candidate("decode, chunk", rows, slices.decode_chunk),
    ]


def seed_candidates(slices: Slices) -> list[Candidate]:
    sample = slices.source[:SEED_ROWS]
    encoded = seed_encode(sample)
    return [
        Candidate("seed encode", SEED_ROWS, lambda _: void(seed_encode(sample))),
        Candidate("seed decode", SEED_ROWS, lambda _: void(seed_decode(*encoded))),
    ]


def void(_: object) -> None:
    """A candidate returns nothing."""


def measure(slices: Slices, threads: int, seconds: float) -> Iterator[Rate]:
    """All candidates take turns until the time is up; each turn takes the next slices."""
    fast, seed = candidates(slices), seed_candidates(slices)
    deadline, number = time.perf_counter() + seconds, 0
    with ThreadPoolExecutor(threads) as executor:
        pool = executor if threads > 1 else None
        while time.perf_counter() < deadline:
            turn = range(number, number + 2 * threads)
            for candidate in fast:
                candidate.run(turn, pool)
            number = (number + 2 * threads) % slices.count
            for candidate in seed:
                candidate.run(range(1), None)
    per_verb = {c.what.removeprefix("seed "): c.rate for c in seed}
    for c in (*fast, *seed):
        seed_rate = per_verb.get(c.what.split(",")[0])
        x_seed = c.rate / seed_rate if seed_rate else None
        name = slices.codec.id.partition(".")[0]
        yield Rate(name, slices.dim, threads, c.what, c.rate, c.rate / fast[0].rate, x_seed)


def show(rates: list[Rate]) -> None:
    print(
        f"{'codec':8} {'D':>4} {'threads':>7}  {'':16}"
        f"{'Mrow/s':>8}{'GB/s bf16':>11}{'x memcpy':>10}{'x seed':>8}"
    )
    for r in rates:
        gb_per_s = r.mrows_per_s * r.dim * 2 / 1e3
        x_seed = f"{r.x_seed:8.0f}" if r.x_seed else ""
        print(
            f"{r.codec:8} {r.dim:4} {r.threads:7}  {r.what:16}{r.mrows_per_s:8.2f}{gb_per_s:11.2f}"
            f"{r.x_memcpy:10.3f}{x_seed}"
        )


def show_scaling(rates: list[Rate]) -> None:
    single = {(r.codec, r.dim, r.what): r.mrows_per_s for r in rates if r.threads == 1}
    for r in rates:
        if r.threads > 1 and not r.what.startswith("seed"):
            scaling = r.mrows_per_s / single[r.codec, r.dim, r.what]
            print(f"{r.codec}, D={r.dim}: {r.what} on {r.threads} threads is {scaling:.2f} of one")


def all_slices(args: argparse.Namespace) -> Iterator[Slices]:
    """One after another: each takes gigabytes."""
    if args.learn is None:
        for name in args.codec or ["tq3"]:
            for dim in args.dims or sorted(MODELS):
                num_heads, num_layers = MODELS[dim]
                layers = (KVLayer(num_heads, dim, dim),) * num_layers
                yield Slices(codec_by_name(name), KVLayout("bfloat16", layers))
        return
    known = captured(args.learn / "kv.npz")
    for dim in args.dims or sorted(MADE):
        for name in args.codec or CALIBRATED:
            profile = learned(args.learn, name, dim, known)
            yield Slices(open_codec(name, profile), profile.layout, made_of(known[0], dim))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--codec", nargs="+")
    parser.add_argument("--dims", type=int, nargs="+", choices=MODELS)
    parser.add_argument("--learn", type=Path, help="keep KV of the sample model and profiles there")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=3.0, help="per dimension and thread count")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rates: list[Rate] = []
    for slices in all_slices(args):
        print(f"{slices.codec.id}, {slices.dim} wide: {slices.bits:.3f} bits", flush=True)
        for threads in args.threads:
            rates += measure(slices, threads, args.seconds)
    show(rates)
    show_scaling(rates)
    if args.json:
        args.json.write_text(json.dumps([asdict(rate) for rate in rates], indent=2) + "\n")


if __name__ == "__main__":
    main()
