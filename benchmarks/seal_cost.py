"""What the seal costs a restore: a session from a sealed tier and from a bare one, in turns.

A session of a small model's shape (30 layers, 3 KV heads of 64) rests on disk, or in a Redis,
packed by each codec; its restore reads, checks and unpacks all of it. The two stores take turns in
one process, and the median of the ratios counts.

    python benchmarks/seal_cost.py [--redis URL] [--tokens 2048] [--rounds 40] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.session import CHUNK_TOKENS, SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVPair, StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.seal import Seal, SealedTier
from tests.kv_sessions import Rows, chain_of

LAYOUT = KVLayout("bfloat16", (KVLayer(3, 64, 64),) * 30)
CAPACITY = 1 << 30
TARGET = 1.03
KINDS = ("bare", "signed", "encrypted")
SESSION = SessionRef("bench", "session", b"a salt of the benchmark")


def rows(num_tokens: int) -> list[KVPair]:
    """Normal values in bf16, (heads, num_tokens, dim) uint16 bit patterns for each layer."""
    chance = np.random.default_rng(0)
    run = LAYOUT.empty(num_tokens)
    for array in (x for pair in run for x in pair):
        values = chance.standard_normal(array.shape, np.float32)
        array[...] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return run


def tier_for(kind: str, folder: Path, url: str, secret: bytes) -> Tier:
    """Open an empty tier, sealed as ``kind`` says; on Redis each kind has names of its own."""
    if url:
        from kvstore.tiers.redis_server.redis_tier import RedisTier

        tier: Tier = RedisTier(url, deadline_s=10.0)
    else:
        tier = DiskTier(folder / kind, CAPACITY)
    if kind == "bare":
        return tier
    return SealedTier(tier, Seal(secret, tier.name, encrypt=kind == "encrypted"))


def store_on(tier: Tier, codec: str) -> ColdStore:
    model = StoredModel("benchmark", "benchmark", LAYOUT)
    config = StoreConfig(codec=codec, num_threads=1)
    return ColdStore(config, model, codec_by_name(codec), [tier])


def restore_s(store: ColdStore, prompt: Sequence[int]) -> float:
    """Seconds to find, read, check and unpack the session."""
    began = time.perf_counter()
    restored = store.restore(store.match(SESSION, chain_of(store, SESSION, prompt)))
    took = time.perf_counter() - began
    assert restored.num_tokens == len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS, restored
    return took


def measure(args: argparse.Namespace, codec: str) -> dict[str, float]:
    prompt = np.random.default_rng(1).integers(0, 50_000, args.tokens).tolist()
    kv, secret = rows(args.tokens), secrets.token_bytes(32)
    with tempfile.TemporaryDirectory() as name:
        stores = {x: store_on(tier_for(x, Path(name), args.redis, secret), codec) for x in KINDS}
        for store in stores.values():
            store.save(SESSION, chain_of(store, SESSION, prompt), Rows(store, kv))
            store.flush(60)
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(args.rounds):  # who comes after whom changes: caches remember
            for kind in (KINDS, KINDS[::-1])[number % 2]:
                times[kind].append(restore_s(stores[kind], prompt))
        for store in stores.values():
            store.close()
    bare = times["bare"]
    return {
        "bare_ms": round(statistics.median(bare) * 1e3, 2),
        **{
            f"{kind}_ratio": round(
                statistics.median(x / y for x, y in zip(times[kind], bare, strict=True)), 4
            )
            for kind in KINDS[1:]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--redis", default="", help="URL; without it the disk is measured")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--codec", nargs="+", default=["raw", "tq3"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    figures = {codec: measure(args, codec) for codec in args.codec}
    met = {codec: row["signed_ratio"] <= TARGET for codec, row in figures.items()}
    text = json.dumps({**figures, "target": TARGET, "met": met}, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
