"""vLLM's own OpenAI server as the gateway starts it: headers, streams, verbs, departures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engines.http import CACHE_HEADER
from kvstore.blobs.chain import RECORD, record_key
from kvstore.tiers.registry import open_tiers
from tests.vllm.rig.served import HISTORY, session
from tests.vllm.start.conftest import STEP_TOKENS
from tests.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
DEPARTURES = 3


def cached_tokens(answer: bytes) -> int:
    """vLLM leaves the details out where nothing was cached."""
    details = json.loads(answer)["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0)


def test_where_the_prompts_kv_came_from(vllm_server):
    headers, first = vllm_server.chat("headers")
    assert headers[CACHE_HEADER].startswith("miss; tokens=0")
    vllm_server.wait_saved("headers")
    headers, _ = vllm_server.chat("headers")
    assert headers[CACHE_HEADER].startswith("hot; tokens=")
    demoted = vllm_server.put_to_sleep("headers", "disk")
    assert (demoted.hot, demoted.tier) == (False, "disk")
    headers, back = vllm_server.chat("headers")
    tokens = cached_tokens(back)
    assert headers[CACHE_HEADER] == f"cold-disk; tokens={tokens}"
    assert tokens > 400
    text = [json.loads(x)["choices"][0]["message"]["content"] for x in (first, back)]
    assert text[0] == text[1]
    assert json.loads(back).get("kv_transfer_params") is None, "it is between us and vLLM"


def test_a_stream_says_it_too(vllm_server):
    vllm_server.chat("stream")
    vllm_server.wait_saved("stream")
    vllm_server.put_to_sleep("stream")
    headers, body = vllm_server.chat("stream", stream=True, stream_options={"include_usage": True})
    assert headers[CACHE_HEADER].startswith("cold-ram; tokens=")
    assert body.rstrip().endswith(b"data: [DONE]")


def test_another_tenant_gets_nothing(vllm_server):
    vllm_server.chat("mine")
    vllm_server.wait_saved("mine")
    headers, answer = vllm_server.chat("mine", tenant="other")
    assert headers[CACHE_HEADER].startswith("miss; tokens=0")
    assert cached_tokens(answer) == 0


def test_vllms_own_sockets_are_in_the_run_folder(vllm_server):
    """So a kill leaves none in /tmp: the next start removes those in the folder."""
    names = [x.name for x in Path(vllm_server.store.disk_path).parent.iterdir() if x.is_socket()]
    assert [x for x in names if re.fullmatch(r"[0-9a-f-]{36}", x)], names


def test_clients_that_leave_during_loads_and_saves_leave_nothing_behind(vllm_server, faults):
    _, right = vllm_server.chat("left")
    vllm_server.wait_saved("left")
    for _ in range(DEPARTURES):
        vllm_server.put_to_sleep("left")
        faults.delay(0.2)
        vllm_server.leave(["left", "left"], faults.is_decoding)
        faults.clear()
        vllm_server.wait_whole()
    for i in range(DEPARTURES):
        faults.clear()
        faults.delay_encoding(0.2)
        vllm_server.chat(f"saver {i}", max_tokens=1)
        vllm_server.leave([f"cut {i}"], faults.is_encoding, max_tokens=1000, ignore_eos=True)
    faults.clear()
    vllm_server.wait_whole()
    vllm_server.put_to_sleep("left")
    headers, back = vllm_server.chat("left")
    assert headers[CACHE_HEADER].startswith("cold-ram; tokens=")
    text = [json.loads(x)["choices"][0]["message"]["content"] for x in (right, back)]
    assert text[0] == text[1]


def test_an_abandoned_prefill_ends_with_its_step_and_is_gone_on_with(vllm_server):
    """The prompt is not computed to its end without a client, and the computed part is reused."""
    long = [{"role": "user", "content": "This is abandoned. " + HISTORY * 6}]
    vllm_server.leave(["abandoned"], lambda: True, messages=long)
    vllm_server.wait_whole()
    headers, answer = vllm_server.chat("abandoned", messages=long)
    prompt_tokens = json.loads(answer)["usage"]["prompt_tokens"]
    assert prompt_tokens > 5 * STEP_TOKENS
    assert headers[CACHE_HEADER].startswith("hot; tokens=")
    assert 0 < cached_tokens(answer) <= prompt_tokens - 2 * STEP_TOKENS


def stored_in(events: list[dict[str, Any]], medium: str) -> list[dict[str, Any]]:
    return [x for x in events if x["type"] == "BlockStored" and x["medium"] == medium]


@pytest.mark.slow
def test_a_router_finds_what_sleeps_and_nothing_that_was_deleted(vllm_server, event_reader):
    def blocks_of(name: str, tenant: str) -> set[bytes]:
        """Chat, and return the blocks that vLLM says are new on its device."""
        vllm_server.wait_all_saved()
        while event_reader.read(0.5):  # what earlier tests have left
            pass
        start = len(event_reader.events)
        vllm_server.chat(name, tenant)
        vllm_server.wait_saved(name)
        event_reader.until(lambda: stored_in(event_reader.events[start:], "CPU"))
        stored = stored_in(event_reader.events[start:], "GPU")
        return {h for event in stored for h in event["block_hashes"]}

    def held(medium: str, blocks: set[bytes]) -> set[bytes]:
        return event_reader.held(medium) & blocks

    asleep = blocks_of("sleeper", "t")
    assert len(asleep) > 10
    # Of an engine that has nothing to do.
    event_reader.until(lambda: held("CPU", asleep) == held("STORAGE", asleep) == asleep)

    # A reader finds every block at every moment, in the order in which events come.
    vllm_server.put_to_sleep("sleeper", "disk")
    event_reader.until(lambda: not held("GPU", asleep) and not held("CPU", asleep))
    assert held("STORAGE", asleep) == asleep
    events = event_reader.events
    first_gone = next(
        i
        for i, x in enumerate(events)
        if x["type"] == "BlockRemoved" and asleep & set(x["block_hashes"])
    )
    for medium in ("GPU", "CPU", "STORAGE"):
        stored = stored_in(events[:first_gone], medium)
        assert asleep <= {h for x in stored for h in x["block_hashes"]}, medium

    other = blocks_of("other", "u")
    event_reader.until(lambda: held("CPU", other) == held("STORAGE", other) == other)
    assert vllm_server.run(vllm_server.server.forget(session("other", "u"))) is not None
    event_reader.until(lambda: not any(held(x, other) for x in ("GPU", "CPU", "STORAGE")))
    assert held("STORAGE", asleep) == asleep
    ours = [x for x in events if x.get("medium") != "GPU"]
    vllms = [x for x in events if x.get("medium") == "GPU"]
    salts = {session("sleeper").salt.hex(), session("other", "u").salt.hex()}
    assert not [x for x in ours if any(salt in repr(x) for salt in salts)]
    assert [x for x in vllms if any(salt in repr(x) for salt in salts)], "as we document"


def test_a_stop_lets_saves_end(vllm_server, faults):
    """The last test: the engine is gone afterwards, and its disk tier can be looked into."""
    vllm_server.wait_all_saved()  # saves of earlier tests would be slowed down as well
    faults.delay_encoding(0.1)  # vLLM gives its processes some seconds to end
    vllm_server.chat("last words", max_tokens=1)
    vllm_server.run(eventually(faults.is_encoding))
    vllm_server.run(vllm_server.server.stop(1.0))
    disk = open_tiers(vllm_server.store, Path(vllm_server.store.disk_path) / "vllm-rank-0")[-1]
    keys = {key for key, _ in disk.scan(RECORD)}
    disk.close()
    assert record_key("t", "last words", "smol rank 0") in keys
