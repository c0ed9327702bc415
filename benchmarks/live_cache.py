"""Compares a packed live cache with mlx_lm's own: memory, speed of decoding, quality.

    python -m benchmarks.live_cache [--tokens 1024 2048] [--steps 8] [--rounds 3] [--json OUT]

One process, one prefill for each length and cache. *KVCache* is mlx_lm's exact cache. Ours is fed
as the engine feeds it, so KV that is computed from packed rows carries their loss on, and attention
reads packed rows as they are (``engine.hot_codec`` does so where that is faster). KL is that of the
next tokens of a held-out text against the exact cache. The caches take turns; the median round
counts, of a batch with one row and with four. ``speed`` is a ratio of wall clock times, ``cpu`` one
of processor times, which a busy machine changes less. Takes minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.families.fast_blas import begin_with_blas
from benchmarks.program import arguments, write_json
from engines.calibration.corpus import held_out_texts
from engines.config import EngineConfig
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches, probe
from engines.mlx_worker.cache.packed_model import attending, with_packed_caches
from engines.mlx_worker.model.loading import LoadedModel, load_model
from launch.machine.folders import default_cache_dir
from launch.model.find import sample_model

PREFILL_STEP = 128
PLAIN = "KVCache"
ROWS = (1, 4)


def fed(model: Any, tokens: Sequence[int]) -> Caches:
    caches: Caches = make_prompt_cache(model)
    for at in range(0, len(tokens), PREFILL_STEP):
        model(mx.array([list(tokens[at : at + PREFILL_STEP])]), cache=caches)
        mx.eval([cache.state for cache in caches])
        kv_arrays.pack_old(caches)
        mx.clear_cache()
    kv_arrays.compact(caches)
    return caches


def entered(way: str, model: Any) -> AbstractContextManager[None]:
    return nullcontext() if way == PLAIN else attending(model)


def logits_after(model: Any, caches: Caches, tokens: Sequence[int]) -> mx.array:
    """Return the logits of the next tokens, fed one by one as in decoding."""
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
    """Return wall clock and processor time per step of a batch of ``rows`` equal sessions."""
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


def one_length(
    loaded: LoadedModel, models: dict[str, Any], tokens: list[int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    prefix, rest = tokens[: -args.scored], tokens[-args.scored :]
    ways = {name: fed(model, prefix) for name, model in models.items()}
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(args.rounds):
        for name, caches in ways.items():
            for rows in ROWS:
                with entered(name, loaded.model):
                    took = step_seconds(loaded.model, caches, args.steps, rows)
                seconds[name, rows].append(took)
    right, nbytes = logits_after(loaded.model, ways[PLAIN], rest), kv_arrays.nbytes_of(ways[PLAIN])
    table = []
    for name, caches in ways.items():
        with entered(name, loaded.model):
            other = logits_after(loaded.model, caches, rest)
        row: dict[str, Any] = {"tokens": len(prefix), "cache": name}
        row["smaller"] = nbytes / kv_arrays.nbytes_of(caches)
        row["kl"] = divergence(right, other)
        for rows in ROWS:
            (wall, cpu), (base, base_cpu) = (
                [statistics.median(x) for x in zip(*seconds[way, rows], strict=True)]
                for way in (name, PLAIN)
            )
            row |= {f"step_ms_{rows}_rows": 1000 * wall, f"speed_{rows}_rows": base / wall}
            row[f"cpu_{rows}_rows"] = base_cpu / cpu
        row = {key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}
        table.append(row)
        print(row, flush=True)
    return table


def measure(args: argparse.Namespace) -> dict[str, Any]:
    loaded = load_model(args.model or str(sample_model(default_cache_dir(os.environ))))
    plan = probe(loaded.model)
    models = {PLAIN: loaded.model}
    for name in args.codecs:
        models[name] = with_packed_caches(loaded.model, plan, EngineConfig(hot_codec=name))[0]
    text = loaded.tokenizer.encode("\n\n".join(x.content for x in held_out_texts()))
    rows = []
    for num in args.tokens:
        rows += one_length(loaded, models, text[: num + args.scored], args)
    return {"rows": rows}


def main() -> None:
    args = arguments(
        __doc__,
        "--model '' --tokens 1024 2048 --codecs tq3 tq4 --scored 48 --steps 8 --rounds 3",
    )
    begin_with_blas("benchmarks.live_cache")
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
