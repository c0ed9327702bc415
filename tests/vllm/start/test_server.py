"""vLLM's own OpenAI server as the gateway starts it: headers, streams, verbs, departures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from engines.http import CACHE_HEADER
from kvstore.blobs.chain import RECORD, record_key
from kvstore.tiers.registry import open_tiers
from tests.vllm.conftest import FAULTY_RAW, model_path
from tests.vllm.rig.faulty_codec import Faults
from tests.vllm.rig.served import Served, session
from tests.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
HISTORY = "The quick brown fox jumps over the lazy dog and runs far away. " * 40
DEPARTURES = 3
STEP_TOKENS = 512


class Chats(Served):
    """The server, asked for chats."""

    def chat(self, name: str, tenant: str = "t", **fields):
        status, headers, answer = self.run(self.post(body_of(name, fields), session(name, tenant)))
        assert status == 200, answer
        return headers, answer

    def leave(self, names: Sequence[str], when: Callable[[], object], **fields) -> None:
        """Ask for all of these at once, and close the connections ``when`` it is time."""

        async def left() -> None:
            asking = [asyncio.create_task(self.post(body_of(x, fields), session(x))) for x in names]
            await self.until_served(len(names))
            await eventually(when)
            assert not any(x.done() for x in asking), "an answer came too early"
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

        self.run(left())


@pytest.fixture(scope="module")
def served(faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    steps = ("--max-num-batched-tokens", str(STEP_TOKENS))
    served = Chats(tmp_path_factory.mktemp("server"), FAULTY_RAW, model_path(), *steps)
    yield served
    faults.clear()
    served.close()


def body_of(name: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Every session's text is its own from the beginning, or they would share blocks."""
    return {
        "model": "smol",
        "messages": [{"role": "user", "content": f"This is {name}. {HISTORY}"}],
        "max_tokens": 8,
        "temperature": 0,
        **fields,
    }


def cached_tokens(answer: bytes) -> int:
    """vLLM leaves the details out where nothing was cached."""
    details = json.loads(answer)["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0)


def test_where_the_prompts_kv_came_from(served):
    headers, first = served.chat("headers")
    assert headers[CACHE_HEADER].startswith("miss; tokens=0")
    served.wait_saved("headers")
    headers, _ = served.chat("headers")
    assert headers[CACHE_HEADER].startswith("hot; tokens=")
    demoted = served.run(served.server.demote(session("headers"), "disk"))
    assert (demoted.report.hot, demoted.report.tier, demoted.kept) == (False, "disk", "")
    headers, back = served.chat("headers")
    tokens = cached_tokens(back)
    assert headers[CACHE_HEADER] == f"cold-disk; tokens={tokens}"
    assert tokens > 400
    text = [json.loads(x)["choices"][0]["message"]["content"] for x in (first, back)]
    assert text[0] == text[1]


def test_a_stream_says_it_too(served):
    served.chat("stream")
    served.wait_saved("stream")
    served.run(served.server.demote(session("stream")))
    headers, body = served.chat("stream", stream=True, stream_options={"include_usage": True})
    assert headers[CACHE_HEADER].startswith("cold-ram; tokens=")
    assert body.rstrip().endswith(b"data: [DONE]")


def test_another_tenant_gets_nothing(served):
    served.chat("mine")
    served.wait_saved("mine")
    headers, answer = served.chat("mine", tenant="other")
    assert headers[CACHE_HEADER].startswith("miss; tokens=0")
    assert cached_tokens(answer) == 0


def test_bad_input_is_vllms_own_error(served):
    body = {"model": "smol", "messages": "nothing"}
    status, _, answer = served.run(served.post(body, session("bad")))
    assert status == 400
    assert "error" in json.loads(answer)


def test_vllms_own_sockets_are_in_the_run_folder(served):
    """So a kill leaves none in /tmp: the next start removes those in the folder."""
    names = [x.name for x in Path(served.store.disk_path).parent.iterdir() if x.is_socket()]
    assert [x for x in names if re.fullmatch(r"[0-9a-f-]{36}", x)], names


def test_forget_and_stats(served):
    served.chat("gone")
    served.wait_saved("gone")
    assert served.run(served.server.forget(session("gone"))) is not None
    assert "gone" not in [x.id for x in served.run(served.server.sessions())]
    report = served.run(served.server.stats())
    assert report.hot_capacity_bytes > 0
    assert {x.name for x in report.tiers} == {"ram", "disk"}


def test_clients_that_leave_during_loads_and_saves_leave_nothing_behind(served, faults):
    _, right = served.chat("left")
    served.wait_saved("left")
    for _ in range(DEPARTURES):
        served.run(served.server.demote(session("left")))
        faults.delay(0.2)
        served.leave(["left", "left"], faults.is_decoding)
        faults.clear()
        served.wait_whole()
    for i in range(DEPARTURES):
        faults.clear()
        faults.delay_encoding(0.2)
        served.chat(f"saver {i}", max_tokens=1)
        served.leave([f"cut {i}"], faults.is_encoding, max_tokens=1000, ignore_eos=True)
    faults.clear()
    served.wait_whole()
    served.run(served.server.demote(session("left")))
    headers, back = served.chat("left")
    assert headers[CACHE_HEADER].startswith("cold-ram; tokens=")
    text = [json.loads(x)["choices"][0]["message"]["content"] for x in (right, back)]
    assert text[0] == text[1]


def test_an_abandoned_prefill_ends_with_its_step_and_is_gone_on_with(served):
    """The prompt is not computed to its end without a client, and the computed part is reused."""
    long = [{"role": "user", "content": "This is abandoned. " + HISTORY * 6}]
    served.leave(["abandoned"], lambda: True, messages=long)
    served.wait_whole()
    headers, answer = served.chat("abandoned", messages=long)
    prompt_tokens = json.loads(answer)["usage"]["prompt_tokens"]
    assert prompt_tokens > 5 * STEP_TOKENS
    assert headers[CACHE_HEADER].startswith("hot; tokens=")
    assert 0 < cached_tokens(answer) <= prompt_tokens - 2 * STEP_TOKENS


def test_a_stop_lets_saves_end(served, faults):
    """The last test: the engine is gone afterwards, and its disk tier can be looked into."""
    served.wait_all_saved()  # saves of earlier tests would be slowed down as well
    faults.delay_encoding(0.3)
    served.chat("last words", max_tokens=1)
    served.run(eventually(faults.is_encoding))
    served.run(served.server.stop(1.0))
    disk = open_tiers(served.store, Path(served.store.disk_path) / "vllm-rank-0")[-1]
    keys = {key for key, _ in disk.scan(RECORD)}
    disk.close()
    assert record_key("t", "last words", "smol rank 0") in keys
