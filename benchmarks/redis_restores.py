"""How fast do sessions come back from Redis, beside a reader that only reads?

python -m benchmarks.redis_restores [--sessions 8] [--tokens 1024] [--rounds 5] [--json OUT]

Saves sessions of the sample model's shape, exactly (``raw``) and sealed as a server seals them,
into a Redis on this machine; then restores all of them at once, each on a thread, as if another
engine had saved them: found, read, verified and laid out as the engine wants them. Compared are
bytes per second with as many redis-py connections that GET the same entries in pipelines and drop
them. Both take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import redis

from benchmarks.stacks.product_stack import write_json
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.session import CHUNK_TOKENS, SessionRef
from kvstore.shapes import KVLayer, KVLayout, StoredModel
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.registry import open_tiers
from tests.kv_sessions import Rows, chain_of
from tests.redis_server import RedisServer

T = TypeVar("T")
LAYOUT: Final = KVLayout("bfloat16", (KVLayer(3, 64, 64),) * 30)  # SmolLM2-135M
PIPELINE: Final = 32  # entries that the raw reader asks for at once
SALT: Final = bytes(32)


class Sessions:
    """Some sessions that rest in Redis and nowhere else."""

    def __init__(self, url: str, folder: Path, args: argparse.Namespace) -> None:
        (folder / "secret").write_bytes(bytes(range(32)))
        (folder / "secret").chmod(0o600)
        self._config = StoreConfig(
            codec=args.codec,
            ram_bytes=0,
            disk_bytes=0,
            redis_url=url,
            redis_deadline_s=30.0,
            restore_deadline_s=60.0,
            save_queue_bytes=8 << 30,
            secret_file=str(folder / "secret"),
        )
        self._folder = folder
        generator = np.random.default_rng(1)
        self.prompts = {
            f"s{i}": generator.integers(0, 49_000, args.tokens).tolist()
            for i in range(args.sessions)
        }

    def open(self) -> ColdStore:
        model = StoredModel("bench", "bench", LAYOUT, False)
        codec = codec_by_name(self._config.codec)
        return ColdStore(self._config, model, codec, open_tiers(self._config, self._folder))

    def save(self) -> None:
        store, generator = self.open(), np.random.default_rng(2)
        for name, prompt in self.prompts.items():
            run = LAYOUT.empty(len(prompt))
            for array in (x for pair in run for x in pair):
                array[...] = generator.integers(0x3F00, 0x3F80, array.shape, np.uint16)
            session = SessionRef("t", name, SALT)
            assert store.save(session, chain_of(store, session, prompt), Rows(store, run))
            assert store.flush(120)
        store.close()

    def restore(self) -> float:
        """Restore all at once; returns seconds."""
        store = self.open()
        try:
            seconds, num_tokens = _timed(partial(self._restore_one, store), self.prompts.items())
        finally:
            store.close()
        assert num_tokens == sum(
            len(x) // CHUNK_TOKENS * CHUNK_TOKENS for x in self.prompts.values()
        )
        return seconds

    def _restore_one(self, store: ColdStore, one: tuple[str, list[int]]) -> int:
        name, prompt = one
        session = SessionRef("t", name, SALT)
        return store.restore(store.match(session, chain_of(store, session, prompt))).num_tokens


def _timed(call: Callable[[T], int], items: Iterable[T]) -> tuple[float, int]:
    """Make all calls at once; returns the seconds, and the sum of the results."""
    waiting = list(items)
    with ThreadPoolExecutor(len(waiting)) as pool:
        began = time.perf_counter()
        result = sum(pool.map(call, waiting))
        return time.perf_counter() - began, result


def read_raw(url: str, num_readers: int) -> tuple[float, int]:
    """GET every entry, each reader its part of them; returns seconds and bytes."""
    with redis.Redis.from_url(url) as client:
        names = sorted(client.scan_iter(count=1000, _type="string"))
    parts = [names[i::num_readers] for i in range(num_readers)]
    clients = [redis.Redis.from_url(url) for _ in parts]
    for client in clients:
        client.ping()

    def read(one: tuple[redis.Redis, list[bytes]]) -> int:
        (client, own), nbytes = one, 0
        for first in range(0, len(own), PIPELINE):
            pipeline = client.pipeline(transaction=False)
            for name in own[first : first + PIPELINE]:
                pipeline.get(name)
            nbytes += sum(map(len, pipeline.execute()))
        return nbytes

    try:
        return _timed(read, zip(clients, parts, strict=True))
    finally:
        for client in clients:
            client.close()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with RedisServer(tcp=True) as server, tempfile.TemporaryDirectory() as folder:
        sessions = Sessions(server.url, Path(folder), args)
        sessions.save()
        restored, raw = [], []
        for _ in range(args.rounds):
            seconds, nbytes = read_raw(server.url, args.sessions)
            raw.append(nbytes / seconds)
            restored.append(nbytes / sessions.restore())  # the same entries
    ratios = [x / y for x, y in zip(restored, raw, strict=True)]
    return {
        "sessions": args.sessions,
        "mib": round(nbytes / 2**20, 1),
        "raw_mb_s": round(statistics.median(raw) / 1e6),
        "restored_mb_s": round(statistics.median(restored) / 1e6),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(x, 3) for x in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
