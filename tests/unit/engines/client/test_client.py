"""The engine client against the fake engine's servers, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.stacks.constants import configured
from engines.base import EngineError, EngineStalled, EngineUnavailable
from engines.client.engine_client import AttachedEngine, EngineClient
from engines.config import EngineConfig
from engines.fake_worker.fake_sessions import CODEC, FakeSessions
from engines.http import CACHE_HEADER
from engines.wire import CodecReport, SessionRef, TenantUses, TierName
from kvstore.session import TenantLimits
from launch.engine_start import engine_factory
from launch.errors import UsageError
from tests.unit.engines.conftest import FakeProcess, worker_config
from tests.waiting import eventually

PATH = "/v1/chat/completions"
SESSION = SessionRef(tenant="t", id="a b/ü%", salt=b"\x01\x02")


def asked(text: str = "hello big world", **fields: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    return json.dumps(body).encode()


def scripted(script: str, stream: bool = True) -> bytes:
    return asked(stream=stream, metadata={"fake": script})


async def answer(client: EngineClient, body: bytes) -> tuple[int, str, bytes]:
    async with client.open(PATH, body, client.session_headers(SESSION)) as upstream:
        return upstream.status, upstream.headers.get(CACHE_HEADER, ""), await upstream.read()


async def test_without_an_engine_there_is_a_reason(folder: Path):
    client = EngineClient(worker_config(folder))
    await client.start()
    assert not client.ready and "starting" in client.trouble
    with pytest.raises(EngineUnavailable, match="starting"):
        await answer(client, asked())
    with pytest.raises(EngineUnavailable):
        await client.stats()
    await client.stop(0)


async def test_a_stream_and_a_whole_answer(client: EngineClient):
    status, cache, body = await answer(client, asked(stream=True))
    assert (status, cache) == (200, "miss; tokens=0; reason=never-stored")
    assert body.endswith(b"data: [DONE]\n\n")
    status, cache, body = await answer(client, asked())
    assert cache == "hot; tokens=3"
    assert json.loads(body)["choices"][0]["message"]["content"] == "You said: hello big world"


async def test_more_sessions_than_fit_in_one_message(folder: Path, fake: FakeProcess):
    names = [f"{i:05d}" + "x" * 2000 for i in range(9000)]  # 18 MB
    for name in names:
        fake.sessions.begin(SessionRef(tenant="t", id=name, salt=b""), ["a"])
    worker = worker_config(folder)
    patient = configured(EngineConfig, kind="fake")
    client = EngineClient(msgspec.structs.replace(worker, engine=patient))
    await client.start()
    await eventually(lambda: client.ready)
    assert [x.id for x in await client.sessions()] == names
    await client.stop(0)


async def test_control_verbs(client: EngineClient):
    await answer(client, asked())
    (report,) = await client.sessions()
    assert (report.tenant, report.id, report.hot) == ("t", SESSION.id, True)
    demoted = await client.demote(SESSION, "disk")
    assert (demoted.report.hot, demoted.report.tier, demoted.kept) == (False, "disk", None)
    woken = await client.prefetch(SESSION)
    assert woken.hot
    assert [(await client.pin(SESSION, x)).pinned for x in (True, False)] == [True, False]
    assert (await client.stats()).counters["turns"] == 1
    await client.forget(SESSION)
    assert await client.sessions() == []
    assert await client.prefetch(SESSION) is None


async def test_the_codec_is_known_as_it_is_now(client: EngineClient, fake: FakeProcess):
    welcome = client.welcome
    assert welcome.codec == CODEC == client.codec
    fake.sessions.codec = CodecReport(name="better")  # another gateway had it adopt that
    await client.stats()
    assert client.codec.name == "better"
    fake.sessions.codec = CODEC
    assert await client.adopt() == CODEC == client.codec
    assert client.welcome is welcome  # by which others know that it is the same engine still


async def test_errors_of_the_engine_are_answers(client: EngineClient):
    status, _, body = await answer(client, scripted("fault=error-400"))
    assert status == 400 and json.loads(body)["error"]["message"] == "not like this"
    status, _, body = await answer(client, scripted("fault=plain-500"))
    assert (status, body) == (500, b"Internal Server Error")


async def test_a_body_of_megabytes(client: EngineClient):
    status, _, body = await answer(client, asked("x" * (3 << 20)))
    assert status == 200 and len(body) > 3 << 20


async def test_a_cut_connection_is_not_taken_for_an_end(client: EngineClient):
    with pytest.raises(EngineUnavailable, match="broke"):
        await answer(client, scripted("fault=cut after=2"))


class LateSessions(FakeSessions):
    """Answers limits of tenants after a minute."""

    async def limit_tenants(self, tiers: Mapping[TierName, TenantLimits]) -> TenantUses:
        await asyncio.sleep(60)
        return TenantUses({})


async def test_limits_of_tenants_wait_only_briefly_for_an_answer(client, fake):
    fake.sessions.limit_tenants = LateSessions(1 << 30).limit_tenants
    async with asyncio.timeout(5):
        with pytest.raises(EngineUnavailable, match="no answer to LimitTenants"):
            await client.limit_tenants({})


async def test_a_silent_stream_stalls(client: EngineClient):
    with pytest.raises(EngineStalled, match=r"0\.4 s"):
        await answer(client, scripted("fault=hang after=2"))


async def test_a_slow_reader_is_not_a_stall(client: EngineClient):
    async with client.open(PATH, asked(stream=True), client.session_headers(SESSION)) as upstream:
        chunks = upstream.chunks()
        body = await anext(chunks)
        await asyncio.sleep(0.8)
        body += b"".join([x async for x in chunks])
    assert body.endswith(b"data: [DONE]\n\n")


async def test_leaving_early_cancels_in_the_engine(client: EngineClient, fake: FakeProcess):
    body = scripted("chunks=100000 delay_s=0.01")
    async with client.open(PATH, body, client.session_headers(SESSION)) as upstream:
        await anext(upstream.chunks())
        assert fake.sessions.num_running == 1
    await eventually(lambda: fake.sessions.num_running == 0)  # by itself it would take longer


async def test_cancelling_while_the_head_is_awaited(client: EngineClient, fake: FakeProcess):
    task = asyncio.create_task(answer(client, scripted("delay_s=1000", stream=False)))
    await eventually(lambda: fake.sessions.num_running == 1)
    task.cancel()
    await eventually(lambda: fake.sessions.num_running == 0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_dead_engine_ends_requests_without_a_stream(client, fake):
    """They have no stall clock; the end of the control link ends them."""
    waiting = asyncio.create_task(answer(client, scripted("delay_s=10", stream=False)))
    await eventually(lambda: fake.sessions.num_running == 1)
    await fake.stop()
    with pytest.raises(EngineUnavailable):
        await waiting
    assert not client.ready
    await fake.start()


async def test_it_comes_back_by_itself_and_says_so(client: EngineClient, fake: FakeProcess):
    notices = client.notices()
    assert await anext(notices) is None
    await fake.stop()
    await eventually(lambda: not client.ready)
    await fake.start()
    await eventually(lambda: client.ready)
    assert await anext(notices) is None
    await answer(client, asked())
    notice = await anext(notices)
    assert notice.cause == "turn"


async def test_a_wrong_token_is_refused(folder: Path, fake: FakeProcess):
    client = EngineClient(worker_config(folder, token="wrong"))
    await client.start()
    await eventually(lambda: "wrong token" in client.trouble)
    assert not client.ready
    await client.stop(0)


async def test_stop_lets_requests_finish(client: EngineClient, fake: FakeProcess):
    running = asyncio.create_task(answer(client, scripted("chunks=20 delay_s=0.01")))
    await eventually(lambda: fake.sessions.num_running == 1)
    async with asyncio.timeout(60):  # it waits for the requests, not for the end of their time
        await client.stop(1000.0)
    assert (await running)[2].endswith(b"data: [DONE]\n\n")


async def test_stop_ends_requests_whose_time_is_over(client: EngineClient, fake: FakeProcess):
    running = asyncio.create_task(answer(client, scripted("chunks=100000 delay_s=0.01")))
    await eventually(lambda: fake.sessions.num_running == 1)
    stopping = asyncio.create_task(client.stop(0.2))
    await eventually(lambda: not client.ready)
    with pytest.raises(EngineUnavailable, match="shutting down"):  # while the other may go on
        await answer(client, asked())
    await stopping
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await running


async def test_stopping_twice_is_stopping_once(client: EngineClient):
    await client.stop(0)
    await client.stop(0)
    assert not client.ready and "shutting down" in client.trouble
    with pytest.raises(EngineUnavailable):
        await client.stats()


def test_attaching_needs_both_addresses(folder: Path):
    with pytest.raises(EngineError, match=r"engine\.control.* without our plug-in"):
        AttachedEngine(worker_config(folder))


async def test_an_engine_without_our_plug_in_is_reported(folder: Path):
    """It serves HTTP, and nothing listens at the control address: nothing is relayed."""
    worker = worker_config(folder)
    addresses = {"url": "http://127.0.0.1:1", "control": "tcp://127.0.0.1:1"}
    engine = msgspec.structs.replace(worker.engine, **addresses)
    attached = AttachedEngine(msgspec.structs.replace(worker, engine=engine))
    await attached.start()
    assert not attached.ready
    assert "nothing listens at tcp://127.0.0.1:1" in attached.trouble
    with pytest.raises(EngineUnavailable, match="without our plug-in"):
        async with attached.open("/v1/chat/completions", b"{}", {}):
            pass
    await attached.stop(0)


def test_engines_by_name_and_by_import_string(folder: Path):
    assert engine_factory("attached") is engine_factory(
        "engines.client.engine_client:AttachedEngine"
    )
    for kind in ("no-such", "no_such_module:Engine", "engines.client.engine_client:NoSuch"):
        with pytest.raises(UsageError):
            engine_factory(kind)
