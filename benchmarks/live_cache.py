"""A live cache that is kept packed, beside mlx_lm's own caches: memory, decode speed, quality.

    python benchmarks/live_cache.py [--tokens 1024 2048] [--steps 8] [--rounds 3] [--json OUT]

One process, one prefill for each length and way of feeding. *KVCache* is mlx_lm's exact cache,
*QuantizedKVCache* its own packed one (the peer; it cannot batch, trim into a batch or be kept
cold). Ours is fed as the engine feeds it, so what it computed while packed carries its loss on;
"after prefill" is the same cache filled from the exact one. KL is that of the next tokens of a
held-out text against the exact cache. The ways take turns; the median round counts. ``speed`` is a
ratio of wall clock times, ``cpu`` one of processor times: a crowded machine changes these less, and
they say nothing where a GPU does the work.

"attending" is the same cache while attention reads packed rows as they are (``engine.hot_codec``
takes this way where it is the faster one); otherwise it reads restored rows.

*Asleep*: the milliseconds to pack all KV of a session for the cold store, and to make caches of
what was packed, with a plain live cache and with a packed one; both give the same bytes' length.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.stacks.product_stack import write_json
from engines.calibration.corpus import held_out_texts
from engines.config import EngineConfig
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan, Caches, probe
from engines.mlx_worker.cache.packed.attention import attending
from engines.mlx_worker.cache.packed_model import PackedCacheModel, with_packed_caches
from engines.mlx_worker.model.loading import LoadedModel, load_model
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.packed_codec import packed_codec
from kvstore.codecs.rows.packed_layout import PackedLayout
from launch.machine.blas import find_blas
from launch.machine.folders import folders
from launch.model.sample import sample_model

PREFILL_STEP = 128
ATTENDING = "attending"


def restart_with_blas() -> None:
    """mlx's wheel for Linux multiplies ten times slower than the BLAS that the product preloads."""
    blas = find_blas(os.environ, folders("", "", os.environ).cache)
    print(blas.message)
    if blas.env:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **blas.env})


def text_of(loaded: LoadedModel, num_tokens: int) -> list[int]:
    joined = "\n\n".join(text.content for text in held_out_texts())
    tokens: list[int] = loaded.tokenizer.encode(joined)
    assert len(tokens) >= num_tokens, f"the texts have {len(tokens)} tokens only"
    return tokens[:num_tokens]


def fed(model: Any, tokens: Sequence[int]) -> Caches:
    caches: Caches = make_prompt_cache(model)
    for at in range(0, len(tokens), PREFILL_STEP):
        model(mx.array([list(tokens[at : at + PREFILL_STEP])]), cache=caches)
        mx.eval([cache.state for cache in caches])
        kv_arrays.pack_old(caches)
        mx.clear_cache()
    kv_arrays.compact(caches)
    return caches


def repacked(live: PackedCacheModel, exact: Caches) -> Caches:
    """The packed cache filled from the exact one."""
    caches: Caches = live.make_cache()
    for cache, source in zip(caches, exact, strict=True):
        cache.append(source.keys[:, :, : source.offset], source.values[:, :, : source.offset])
    kv_arrays.compact(caches)
    return caches


def quantized(exact: Caches, num_bits: int) -> Caches:
    caches: Caches = [cache.to_quantized(group_size=64, bits=num_bits) for cache in exact]
    mx.eval([cache.state for cache in caches])
    return caches


def entered(way: str, model: Any) -> AbstractContextManager[None]:
    return attending(model) if way.endswith(ATTENDING) else nullcontext()


def logits_after(model: Any, caches: Caches, tokens: Sequence[int]) -> mx.array:
    """Logits of the next tokens, fed one by one as in decoding."""
    caches, logits = deepcopy(caches), []
    for token in tokens:
        logits.append(model(mx.array([[token]]), cache=caches)[0].astype(mx.float32))
        mx.eval(logits[-1])
    return mx.concatenate(logits)


def divergence(right: mx.array, other: mx.array) -> float:
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (right, other))
    nats = (mx.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean().item()
    assert isinstance(nats, float)
    return nats


def step_seconds(model: Any, caches: Caches, steps: int, rows: int) -> tuple[float, float]:
    """Wall clock and processor time per decode step of a batch of ``rows`` equal sessions."""
    if rows > 1:
        work = [cache.merge([deepcopy(cache) for _ in range(rows)]) for cache in caches]
    else:
        work = deepcopy(caches)
    token, wall, cpu = mx.zeros((rows, 1), mx.int32), [], []
    for _ in range(steps + 1):
        begun, begun_cpu = time.perf_counter(), time.process_time()
        mx.eval(model(token, cache=work))
        wall.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - begun_cpu)
    return statistics.median(wall[1:]), statistics.median(cpu[1:])


class Live(NamedTuple):
    """The model with caches that a codec keeps packed."""

    name: str
    model: PackedCacheModel
    plan: CachePlan


def one_length(
    loaded: LoadedModel, plain: CachePlan, lives: list[Live], args: Any, n: int
) -> list[Any]:
    tokens = text_of(loaded, n + args.scored)
    prefix, rest = tokens[:n], tokens[n:]
    exact = fed(loaded.model, prefix)
    ways: dict[str, Caches] = {"KVCache": exact}
    for num_bits in (3, 4):
        ways[f"QuantizedKVCache {num_bits} bits"] = quantized(exact, num_bits)
    for name, live, _ in lives:
        ways[f"{name}, after prefill"] = repacked(live, exact)
        ways[name] = ways[f"{name}, {ATTENDING}"] = fed(live, prefix)
    right = logits_after(loaded.model, exact, rest)
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for name, caches in ways.items():
            for rows in (1, 4) if hasattr(caches[0], "merge") else (1,):
                with entered(name, loaded.model):
                    took = step_seconds(loaded.model, caches, args.steps, rows)
                seconds.setdefault((name, rows), []).append(took)
    table = []
    for name, caches in ways.items():
        with entered(name, loaded.model):
            other = logits_after(loaded.model, caches, rest)
        row: dict[str, Any] = {
            "tokens": n,
            "cache": name,
            "bytes": kv_arrays.nbytes_of(caches),
            "smaller_than_KVCache": ratio(kv_arrays.nbytes_of(exact), kv_arrays.nbytes_of(caches)),
            "kl": round(divergence(right, other), 5),
            "top1": round(float(np.asarray(right.argmax(-1) == other.argmax(-1)).mean()), 3),
        }
        for rows in (1, 4):
            if (name, rows) in seconds:
                (wall, cpu), (base, base_cpu) = (
                    [statistics.median(x) for x in zip(*seconds[way, rows], strict=True)]
                    for way in (name, "KVCache")
                )
                row[f"step_ms_{rows}_rows"] = round(1000 * wall, 1)
                row[f"speed_{rows}_rows"] = ratio(base, wall)
                row[f"cpu_{rows}_rows"] = ratio(base_cpu, cpu)
        table.append(row)
        print(row, flush=True)
    return [*table, *(asleep(loaded, plain, live, exact, n, args) for live in lives)]


def asleep(
    loaded: LoadedModel, plain: CachePlan, live: Live, exact: Caches, n: int, args: Any
) -> dict[str, Any]:
    """Milliseconds of going to sleep and of waking, plain and packed, and how many times faster."""
    caches, codec = repacked(live.model, exact), codec_by_name(live.name)
    assert plain.layout is not None and isinstance(live.plan.layout, PackedLayout)
    ways = {
        "plain": (loaded.model, exact, codec, plain.layout),
        "packed": (live.model, caches, packed_codec(codec, live.plan.layout), live.plan.layout),
    }
    took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, (model, held, packer, layout) in ways.items():
            begun = time.perf_counter()
            payload = packer.encode(kv_arrays.growing_run(held, n), layout, 0)
            packed = time.perf_counter()
            run = layout.empty(n)
            packer.decode(memoryview(payload), layout, 0, run)
            kv_arrays.rebuild(model, layout, run, None, n)
            took[way].append((packed - begun, time.perf_counter() - packed))
    row: dict[str, Any] = {"tokens": n, "asleep": live.name}
    sleep, wake = ([1000 * min(x[i] for x in took[way]) for way in ways] for i in (0, 1))
    for name, (of_plain, of_packed) in (("sleep", sleep), ("wake", wake)):
        row |= {f"{name}_ms": round(of_packed, 1), f"{name}_faster": ratio(of_plain, of_packed)}
    print(row, flush=True)
    return row


def ratio(one: float, other: float) -> float:
    return round(one / other, 2)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    path = Path(args.model) if args.model else sample_model(folders("", "", os.environ).cache)
    loaded = load_model(str(path))
    plan = probe(loaded.model)
    lives = [
        Live(name, *with_packed_caches(loaded.model, plan, EngineConfig(hot_codec=name)))
        for name in args.codecs
    ]
    rows = [row for n in args.tokens for row in one_length(loaded, plan, lives, args, n)]
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a folder; the sample model without it")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--codecs", nargs="+", default=["tq3", "tq4"])
    parser.add_argument("--scored", type=int, default=48, help="tokens whose KL is measured")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    restart_with_blas()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
