"""``python -m engines.mlx_worker`` as the gateway meets it: a child with two sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.base import EngineUnavailable
from engines.client.child_engine import MlxServer
from engines.config import WRONG_SETTINGS, EngineConfig, WorkerConfig
from engines.http import CACHE_HEADER
from engines.wire import (
    SessionRef,
)
from kvstore.config import StoreConfig
from tests.faults.redis_tiers import SlowLine
from tests.integration.mlx_owner.harness import session
from tests.integration.tiny_models import write_model
from tests.redis_server import RedisServer
from tests.waiting import eventually

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

ONE = session("one")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model("llama", folder)
    return folder


def settings(model: Path, folder: Path) -> WorkerConfig:
    return WorkerConfig(
        engine=EngineConfig(kind="mlx", hot_bytes=64 << 20),
        store=StoreConfig(codec="raw", disk_path=str(folder), disk_bytes=64 << 20),
        model_path=str(model),
        served_model_name="tiny",
        runtime_dir=str(folder / "run"),
        token="secret",
    )


@asynccontextmanager
async def running(
    config: WorkerConfig, env: dict[str, str] | None = None
) -> AsyncIterator[MlxServer]:
    server = MlxServer(config, env)
    await server.start()
    try:
        await until_ready(server)
        yield server
    finally:
        await server.stop(drain_s=1.0)


async def until_ready(server: MlxServer) -> None:
    await eventually(lambda: server.ready, within_s=120)


async def complete(
    server: MlxServer, prompt: list[int], ref: SessionRef = ONE, **fields: Any
) -> tuple[dict[str, Any], str]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    headers = {**server.session_headers(ref), "content-type": "application/json"}
    async with server.open("/v1/completions", json.dumps(body).encode(), headers) as upstream:
        answer = json.loads(await upstream.read())
        assert upstream.status == 200, answer
        return answer, upstream.headers[CACHE_HEADER]


PROMPT = [10 + i * i % 300 for i in range(300)]


async def test_a_session_sleeps_wakes_and_survives_a_restart(model: Path, tmp_path: Path):
    config = settings(model, tmp_path)
    async with running(config) as server:
        assert server.welcome.hibernation
        assert (server.welcome.engine, server.welcome.codec.id) == ("mlx", "raw.1")
        live, in_bf16 = server.welcome.live_kv, server.welcome.bf16_kv
        assert live and in_bf16 and live.per_token in (in_bf16.per_token, 2 * in_bf16.per_token)
        first, cache = await complete(server, PROMPT)
        assert cache == "miss; tokens=0; reason=never-stored"
        again, cache = await complete(server, PROMPT)
        assert cache == "hot; tokens=299"
        assert again["choices"] == first["choices"]
        demoted = await server.demote(ONE, "disk")
        assert demoted.kept is None and demoted.report is not None
        assert (demoted.report.hot, demoted.report.tier) == (False, "disk")
        report = await server.prefetch(ONE)
        assert report.hot
        pinned = await server.pin(ONE, True)
        assert pinned.pinned
        assert (await server.demote(ONE)).kept == "pinned"
        for name in ("control.sock", "http.sock"):
            assert (tmp_path / "run" / name).stat().st_mode & 0o077 == 0
        stats = await server.stats()
        assert stats.idle_hot_bytes <= stats.hot_bytes <= stats.hot_capacity_bytes
        causes = await notices(server, 6)
        assert {"turn", "saved", "dropped", "restored"} <= set(causes)
    async with running(config) as server:
        (report,) = await server.sessions()
        assert (report.id, report.hot, report.tier, report.pinned) == ("one", False, "disk", True)
        woken, cache = await complete(server, PROMPT)
        assert cache == "cold-disk; tokens=288"
        assert woken["choices"] == first["choices"]
        await server.forget(ONE)
        assert await server.sessions() == []


async def notices(server: MlxServer, at_least: int) -> list[str]:
    causes: list[str] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(60):
            async for notice in server.notices():
                if notice is not None:
                    causes.append(notice.cause)
                if len(causes) >= at_least:
                    break
    return causes


async def struck(server: MlxServer, number: int) -> bool:
    """Send the engine a signal while it decodes, and wait for the next; was the answer cut off?"""
    pid = server.pid
    assert pid is not None
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4000, "stream": True}
    headers = {**server.session_headers(ONE), "content-type": "application/json"}
    sent = cut_off = False
    try:
        async with server.open("/v1/completions", json.dumps(body).encode(), headers) as upstream:
            async for chunk in upstream.chunks():
                if b'"text"' in chunk and not sent:  # it decodes, so the prompt is fed
                    sent = True
                    os.kill(pid, number)
    except EngineUnavailable:
        cut_off = True
    while server.pid in (None, pid):
        await asyncio.sleep(0.05)
    await until_ready(server)  # the supervisor has started it again
    return cut_off


async def test_a_kill_in_mid_stream_costs_a_recompute_at_most(model, tmp_path, caplog):
    """And SIGTERM nothing: what runs is saved."""
    async with running(settings(model, tmp_path)) as server:
        expected, _ = await complete(server, PROMPT)
        await server.demote(ONE, "disk")
        assert await struck(server, signal.SIGKILL)
        answer, cache = await complete(server, PROMPT)
        assert cache == "cold-disk; tokens=288"
        assert answer["choices"] == expected["choices"]

        await server.forget(ONE)
        assert "ended with code 0" not in caplog.text
        await struck(server, signal.SIGTERM)  # as the engine leaves, its streams may break off
        (report,) = await server.sessions()
        assert report.id == "one" and report.tier == "disk"
        assert report.tokens >= len(PROMPT) // 32 * 32
    assert "the engine ended with code 0" in caplog.text


FAST, SLOW = 1 << 30, 100_000  # bytes/s


@pytest.mark.redis
async def test_a_kill_in_the_middle_of_a_restore_costs_a_recompute_at_most(model, tmp_path):
    with RedisServer(tcp=True) as far, SlowLine(far.url, FAST) as line:
        config = settings(model, tmp_path)
        own = {"ram_bytes": 0, "disk_bytes": 0, "redis_url": line.url, "redis_deadline_s": 60.0}
        store = msgspec.structs.replace(config.store, **own)
        async with running(msgspec.structs.replace(config, store=store)) as server:
            expected, _ = await complete(server, PROMPT)
            assert (await server.demote(ONE)).kept is None
            pid, before, line.bytes_per_s = server.pid, line.answered_bytes, SLOW
            assert pid is not None
            waking = asyncio.create_task(complete(server, PROMPT))
            await eventually(lambda: line.answered_bytes >= before + 2 * SLOW)
            assert not waking.done()
            os.kill(pid, signal.SIGKILL)
            line.bytes_per_s = FAST
            with pytest.raises(EngineUnavailable):
                await waking
            while server.pid in (None, pid):
                await asyncio.sleep(0.05)
            await until_ready(server)
            again, cache = await complete(server, PROMPT)
            assert cache == "cold-redis; tokens=288"
            assert again["choices"] == expected["choices"]


async def fresh(config: WorkerConfig, folder: Path) -> Any:
    """The answer of an engine with these settings that keeps nothing from before."""
    own = msgspec.structs.replace(config.store, disk_path=str(folder))
    run = str(folder / "run")
    async with running(msgspec.structs.replace(config, store=own, runtime_dir=run)) as server:
        return (await complete(server, PROMPT))[0]["choices"]


@pytest.mark.parametrize(
    "changed",
    ["weights", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("dtype", "tokenizer"))],
)
async def test_another_model_begins_anew_and_leaves_the_first_ones_sessions(
    model: Path, tmp_path: Path, changed: str
):
    """The engine comes back with one thing changed, and then as it was."""
    config = other = settings(model, tmp_path)
    folder = tmp_path / "other"
    if changed == "dtype":
        engine = msgspec.structs.replace(config.engine, dtype="float16")
        other = msgspec.structs.replace(config, engine=engine)
    else:
        write_model("llama", folder, seed=int(changed == "weights"))
        if changed == "tokenizer":
            content = json.loads((folder / "tokenizer_config.json").read_text())
            about = {**content, "clean_up_tokenization_spaces": True}
            (folder / "tokenizer_config.json").write_text(json.dumps(about))
        other = msgspec.structs.replace(config, model_path=str(folder))
    right = await fresh(other, tmp_path / "fresh")
    async with running(config) as server:
        expected, _ = await complete(server, PROMPT)
        assert (await server.demote(ONE, "disk")).kept is None
    async with running(other) as server:
        answer, cache = await complete(server, PROMPT)
        assert cache.startswith("miss"), cache
        assert answer["choices"] == right
    async with running(config) as server:
        answer, cache = await complete(server, PROMPT)
        assert cache.startswith("cold-disk"), cache
        assert answer["choices"] == expected["choices"]


async def test_too_little_hot_memory_ends_the_process_with_a_sentence(tmp_path: Path, model: Path):
    """It ends after the weights were read, and mlx's thread must not abort on its way out."""
    config = settings(model, tmp_path)
    small = msgspec.structs.replace(config.engine, hot_bytes=1 << 10)
    err = await refusal_of(msgspec.structs.replace(config, engine=small))
    assert b"tiny cannot be served: hot_bytes = 1024 is too little" in err


async def refusal_of(config: WorkerConfig) -> bytes:
    """Standard error of a process that cannot serve its configuration."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engines.mlx_worker",
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate(msgspec.json.encode(config) + b"\n")
    assert process.returncode == WRONG_SETTINGS
    assert b"Traceback" not in err
    return err
