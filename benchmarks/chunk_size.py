"""Compares sizes of chunks: bytes of whole sessions, times to pack and restore, the index.

    python -m benchmarks.chunk_size [--sizes 32 64] [--codecs tq3 raw] [--profile FILE] [--json OUT]

Sessions of SmolLM2-135M's shape with made-up rows are saved into a RAM tier and restored from it.
*Ratio* is what the stored tokens, those in full chunks, take in bf16 over what the tier holds of
the session, index and record included. Times are processor time of all threads, which others on the
machine disturb least; sizes take turns in each round, and the least counts. *Index* is the memory
that Python has in use for the session in the store and its tier, besides the packed bytes
(``tracemalloc``). A session of ``COMPUTED`` tokens is computed from the arithmetic of ``thermocline
plan``. With a profile, learned presets can be named; they pack the made-up rows less densely than
rows of the model.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import isnan, nan
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.codecs.base import Codec
from kvstore.codecs.presets import open_codec
from kvstore.codecs.profile import load_profile
from kvstore.config import StoreConfig
from kvstore.session import SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVRun, StoredModel, slice_tokens
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.ram_tier import RamTier
from launch.families.cache_shape import CacheShape
from launch.plan.cold_size import cold_size
from tests.kv_sessions import Rows, chain_of

LAYOUT: Final = KVLayout("bfloat16", (KVLayer(3, 64, 64),) * 30)  # SmolLM2-135M
LENGTHS: Final = (300, 1000, 4000)
COMPUTED: Final = 140_000
CAPACITY: Final = 4 << 30
SESSION: Final = SessionRef("tenant", "3f2504e0-4f89-11d3-9a0c-0305e82c3301", b"salt")


@dataclass
class Row:
    codec: str
    size: int  # tokens of a chunk
    num_tokens: int
    stored_tokens: int  # in full chunks
    cold_bytes: int
    ratio: float  # of stored tokens in bf16
    pack_ms: float = nan
    restore_ms: float = nan
    index_bytes: int = 0


def made_up(num_tokens: int) -> KVRun:
    """Normal values in bf16, (heads, num_tokens, dim) uint16 bit patterns for each layer."""
    rng = np.random.default_rng(0)
    run = LAYOUT.empty(num_tokens)
    for array in (x for pair in run for x in pair):
        array[...] = rng.standard_normal(array.shape, np.float32).view(np.uint32) >> 16
    return run


def row_of(codec: Codec, size: int, num_tokens: int, cold_bytes: int) -> Row:
    kept = num_tokens // size * size
    ratio = kept * LAYOUT.elements_per_token * 2 / cold_bytes
    return Row(codec.id, size, num_tokens, kept, cold_bytes, ratio)


def stored(codec: Codec, size: int, run: KVRun, prompt: Sequence[int]) -> tuple[Row, ColdStore]:
    """Save one session into a store of its own; the time ends when the tier has it."""
    config = StoreConfig(num_threads=1, save_queue_bytes=CAPACITY)
    model = StoredModel("benchmark", "benchmark", LAYOUT)
    store = ColdStore(config, model, codec, [RamTier(CAPACITY)], chunk_tokens=size)
    rows, chain = Rows(store, slice_tokens(run, 0, len(prompt))), chain_of(store, SESSION, prompt)
    began = time.process_time()
    assert store.save(SESSION, chain, rows) and store.flush(600)
    pack_ms = 1e3 * (time.process_time() - began)
    found = row_of(codec, size, len(prompt), store.stats().tiers[0].nbytes)
    found.pack_ms = pack_ms
    return found, store


def restore_ms(store: ColdStore, prompt: Sequence[int]) -> float:
    began = time.process_time()
    restored = store.restore(store.match(SESSION, chain_of(store, SESSION, prompt)))
    took = 1e3 * (time.process_time() - began)
    assert restored.num_tokens == len(prompt) // store.chunk_tokens * store.chunk_tokens
    return took


def index_bytes(codec: Codec, size: int, run: KVRun, prompt: Sequence[int]) -> int:
    """Memory that a saved session takes besides its packed bytes."""
    stored(codec, size, run, prompt[:size])[1].close()  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        empty = tracemalloc.get_traced_memory()[0]
        _, store = stored(codec, size, run, prompt)
        with closing(store):
            gc.collect()
            held = tracemalloc.get_traced_memory()[0] - empty
            packed = sum(len(x) for _, x in store.ledger.stack.tiers[0].scan(b""))
            return held - packed
    finally:
        tracemalloc.stop()


def measure(codec: Codec, sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    run = made_up(max(LENGTHS))
    for num_tokens in LENGTHS:
        prompt = np.random.default_rng(1).integers(0, 49_152, num_tokens).tolist()
        best: dict[int, Row] = {}
        for _ in range(rounds):
            for size in sizes:
                row, store = stored(codec, size, run, prompt)
                with closing(store):
                    row.restore_ms = min(restore_ms(store, prompt) for _ in range(3))
                best[size] = row = _better(best.get(size), row)
        for size in sizes:
            best[size].index_bytes = index_bytes(codec, size, run, prompt)
            yield best[size]
    for size in sizes:
        shape = CacheShape(LAYOUT.layers)
        nbytes = cold_size(shape, codec, "bfloat16", COMPUTED, size).total
        yield row_of(codec, size, COMPUTED, nbytes)


def _better(before: Row | None, row: Row) -> Row:
    """Take the least of each time."""
    if before is not None:
        row.pack_ms = min(before.pack_ms, row.pack_ms)
        row.restore_ms = min(before.restore_ms, row.restore_ms)
    return row


def print_table(rows: Sequence[Row]) -> None:
    print(
        "| codec | tokens | chunk | stored | bytes | ratio | pack, ms | restore, ms | index, KB |"
    )
    print("|---|" + "---:|" * 8)
    for x in rows:
        times = ["" if isnan(y) else f"{y:.1f}" for y in (x.pack_ms, x.restore_ms)]
        index = f"{x.index_bytes / 1e3:.0f}" if x.index_bytes else ""
        cells = [
            x.codec,
            f"{x.num_tokens:,}",
            x.size,
            f"{x.stored_tokens:,}",
            f"{x.cold_bytes:,}",
            f"{x.ratio:.3f}",
        ]
        print("| " + " | ".join(map(str, [*cells, *times, index])) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--codecs", nargs="+", default=["tq3", "raw"])
    parser.add_argument("--profile", type=Path, help="of a model of this shape")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    profile = load_profile(args.profile) if args.profile else None
    rows = [
        row
        for name in args.codecs
        for row in measure(open_codec(name, profile), args.sizes, args.rounds)
    ]
    print_table(rows)
    if args.json:
        found = [{k: v for k, v in asdict(x).items() if v == v} for x in rows]  # without NaN
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
