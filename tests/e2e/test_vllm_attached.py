"""A vLLM started by the lines of docs/hardware.md, and a gateway attached to it.

One start of vLLM serves all tests of this file.
"""

from __future__ import annotations

import shlex
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.stacks.attached_vllm import Elsewhere, started
from benchmarks.stacks.product_stack import MIB, Stack, prose
from tests.e2e.conftest import python_with_vllm
from tests.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1500)]

PYTHON = python_with_vllm()

# For a small CPU, beside the documented options; a pool for three of the tests' chats.
SMALL = (
    "--kv-cache-memory-bytes 268435456 --dtype float32 --enforce-eager --block-size 32"
    " --max-model-len 1024 --max-num-seqs 2"
)
POOL_BLOCKS = 60
STORE = {"codec": "raw", "ram_bytes": 512 * MIB, "disk_bytes": 1024 * MIB}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    options = [*shlex.split(SMALL), "--num-gpu-blocks-override", str(POOL_BLOCKS)]
    engine = started(PYTHON, tmp_path_factory.mktemp("elsewhere"), STORE, options)
    yield engine
    engine.end(within_s=60)


@pytest.fixture(scope="module")
def stack(elsewhere: Elsewhere) -> Iterator[Stack]:
    elsewhere.wait_for_port()
    with Stack(elsewhere.settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def ask(sdk: openai.OpenAI, session: str, num_words: int = 400):
    return sdk.chat.completions.with_raw_response.create(
        model=sdk.models.list().data[0].id,
        messages=[{"role": "user", "content": prose(session, num_words)}],
        temperature=0,
        max_tokens=4,
        extra_headers={"X-Session-ID": session},
    )


def wait_for(
    sdk: openai.OpenAI, session: str, state: str, tier: str | None = None, within_s: float = 60
) -> None:
    row: dict[str, object] = {}

    def is_there() -> bool:
        with suppress(openai.APIStatusError):  # not attached, perhaps
            row.update(sdk.get(f"/sessions/{session}", cast_to=object))
            return row["state"] == state and (tier is None or row["tier"] == tier)
        return False

    until(is_there, within_s, what=(state, tier, row))


def put_to_sleep(sdk: openai.OpenAI, elsewhere: Elsewhere, session: str) -> None:
    """A session whose blocks vLLM drops without the gateway."""
    ask(sdk, session)
    wait_for(sdk, session, "idle", "ram")
    elsewhere.drop_blocks()
    wait_for(sdk, session, "cold")


def figures(url: str) -> dict[tuple[str, ...], float]:
    """Samples by name and the last label's value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (
                sample.name,
                *(v for k, v in sample.labels.items() if k in ("event", "tier", "source")),
            ): sample.value
            for family in families
            for sample in family.samples
        }


def test_blocks_that_vllm_drops_turn_a_session_cold(sdk, elsewhere):
    put_to_sleep(sdk, elsewhere, "reset")
    answer = ask(sdk, "reset")
    cached = answer.parse().usage.prompt_tokens_details.cached_tokens
    assert answer.headers["x-thermocline-cache"] == f"cold-ram; tokens={cached}"
    assert cached > 300
    wait_for(sdk, "reset", "idle")


def test_blocks_that_vllm_reuses_turn_a_session_cold(sdk):
    ask(sdk, "old", 700)
    wait_for(sdk, "old", "idle", "ram")
    for name in ("new", "newer"):
        ask(sdk, name, 700)
    wait_for(sdk, "old", "cold")
    wait_for(sdk, "newer", "idle")


def test_both_metrics_agree(sdk, stack, elsewhere):
    put_to_sleep(sdk, elsewhere, "counted")
    ask(sdk, "counted")
    ours = figures(stack.url)
    assert ours["thermocline_engine_hot_capacity_bytes",] > 0
    assert ours["thermocline_tier_bytes", "ram"] > 0
    assert ours["thermocline_engine_events_total", "prompts"] >= 2
    end = time.monotonic() + 60
    while True:  # vLLM reports with its steps
        ask(sdk, "steps", 5)
        theirs = figures(f"http://127.0.0.1:{elsewhere.port}")
        restored = figures(stack.url)["thermocline_engine_events_total", "restored_tokens.ram"]
        reported = theirs.get(("vllm:thermocline_events_total", "restored_tokens.ram"))
        by_source = theirs.get(("vllm:prompt_tokens_cached_by_source_total", "host"))
        if reported == by_source == restored:
            break
        assert time.monotonic() < end, (theirs, restored)
        time.sleep(0.5)
    assert restored > 300
    assert theirs["vllm:thermocline_tier_bytes", "ram"] > 0
    assert theirs["vllm:thermocline_tier_available", "disk"] == 1


def test_a_gateway_that_comes_back_finds_its_sessions(sdk, stack, elsewhere):
    """The engine is none of its own, and goes on when a gateway ends."""
    ask(sdk, "kept")
    wait_for(sdk, "kept", "idle", "ram")
    again = elsewhere.folder / "again"
    shutil.copytree(stack.root / "data", again / "data")  # the secret, and so the salts
    with (
        Stack(elsewhere.settings, folder=again) as second,
        openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0) as other,
    ):
        wait_for(other, "kept", "idle", "ram")
        assert ask(other, "kept").headers["x-thermocline-cache"].startswith("hot; tokens=")
    assert elsewhere.process.poll() is None
    assert ask(sdk, "kept").headers["x-thermocline-cache"].startswith("hot; tokens=")


@pytest.mark.thorough
def test_an_engine_that_is_asked_to_end_comes_back_with_its_sessions(sdk, elsewhere):
    """Asked right after an answer, while the turn is still being saved. The last test here."""
    said = ask(sdk, "ending", 700).parse().choices[0].message.content
    elsewhere.end(within_s=60)
    elsewhere.start()
    elsewhere.wait_for_port()
    wait_for(sdk, "ending", "cold", "disk", within_s=120)
    back = ask(sdk, "ending", 700)
    assert back.headers["x-thermocline-cache"].startswith("cold-disk; tokens=")
    assert back.parse().usage.prompt_tokens_details.cached_tokens > 600
    assert back.parse().choices[0].message.content == said
