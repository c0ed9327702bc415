"""An upgrade: sessions that an older release left on disk and in Redis return with this one.

git worktree add ../older REF && (cd ../older && bash launch/install.sh)
python -m benchmarks.upgrade ../older [--kind mlx|vllm] [--codec raw] [--sessions 6] [--json OUT]

The older release takes one turn of each session and stops; this one takes the next turns, twice:
with an empty data folder, the same Redis and the same secret, then on the old data folder without
Redis, so that neither finds anything of this release. Of both it counts the sources, and compares
answers with those of a server that has never stored anything (which are equal with ``raw`` only).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.stacks.product_stack import MIB, WORD_TOKENS, Stack, client_of, prose, write_json
from launch.machine.folders import default_cache_dir
from launch.model import sample_model
from tests.redis_server import RedisServer

History = list[dict[str, str]]


def older_release(code: Path, settings: dict[str, Any], folder: Path) -> Stack:
    """The server by the code and in the environment of the folder ``code``."""
    return Stack(
        settings,
        folder=folder,
        start_timeout_s=900,
        environment={"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"},
        python=str(code / ".venv/bin/python"),
    )


async def turns(stack: Stack, histories: dict[str, History], text: str) -> dict[str, Any]:
    """Take one turn of every session; returns counted sources and the answers."""
    sources: Counter[str] = Counter()
    reused = []
    answers = {}
    async with client_of(stack) as client:
        for session, history in histories.items():
            reply = await client.chat([*history, {"role": "user", "content": text}], session, 16)
            if not reply.ok:
                raise RuntimeError(f"{session}: {reply.status} {reply.error}")
            sources[reply.cache.partition(";")[0]] += 1
            reused.append(reply.cached_tokens / reply.prompt_tokens)
            answers[session] = reply.text
    return {"sources": dict(sources), "reused_share_min": min(reused), "answers": answers}


def compared(after: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    answers = after.pop("answers")
    equal = sum(answers[x] == fresh["answers"][x] for x in answers)
    return {**after, "equal_answers": equal}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    words = int(args.tokens / WORD_TOKENS)
    histories: dict[str, History] = {
        f"s{i}": [{"role": "user", "content": f"Notes {i}: {prose(i, words)}"}]
        for i in range(args.sessions)
    }
    with ExitStack() as held:
        root = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="thermocline-")))
        redis = held.enter_context(RedisServer("--maxmemory", "1gb", tcp=True))
        (root / "secret").write_bytes(os.urandom(32))
        store = {
            "codec": args.codec,
            "ram_bytes": 64 * MIB,
            "disk_bytes": 512 * MIB,
            "secret_file": str(root / "secret"),
        }
        settings: dict[str, Any] = {
            "engine": {
                "kind": args.kind,
                "model": str(sample_model(default_cache_dir(os.environ))),
                "hot_bytes": 256 * MIB,
                "max_context": 2048,
            },
            "store": {**store, "redis_url": redis.url},
        }
        if args.kind == "vllm":
            settings["engine.vllm"] = {"python": args.vllm_python}

        older = older_release(args.older.resolve(), settings, root / "data")
        with older:
            first = asyncio.run(turns(older, histories, "One word, please."))
        for session, history in histories.items():
            history += [
                {"role": "user", "content": "One word, please."},
                {"role": "assistant", "content": first["answers"][session]},
            ]

        def second(name: str, **changed: Any) -> dict[str, Any]:
            own = {**settings, "store": {**settings["store"], **changed}}
            with Stack(own, folder=root / name, start_timeout_s=900) as stack:
                return asyncio.run(turns(stack, histories, "And another one?"))

        only_redis = second("empty")
        only_disk = second("data", redis_url="")
        without_store = second("fresh", redis_url="", secret_file="")
        return {
            "sessions": args.sessions,
            "kind": args.kind,
            "codec": args.codec,
            "only_redis": compared(only_redis, without_store),
            "only_disk": compared(only_disk, without_store),
            "fresh_sources": without_store["sources"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("older", type=Path, help="folder of the older release, installed")
    parser.add_argument("--kind", default="mlx", choices=["mlx", "vllm"])
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
