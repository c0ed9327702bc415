"""What the dashboard and its events say of real vLLM: a prompt that is being read, a measurement.

vLLM takes its prompt in small steps here, so that it is read for seconds.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.stacks.product_stack import MIB, Stack, prose
from tests.asking import asked
from tests.e2e.conftest import python_with_vllm
from tests.integration.dashboard.browser import Browser, chromium

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.vllm,
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

STEP_TOKENS = 64
WAIT_S = 300
CLICK_S = 60  # for its answer; the engine gives a tier 30


@pytest.fixture(scope="module")
def stepping() -> Iterator[Stack]:
    """Gateway and vLLM; the model is not measured, and the engine does not measure it."""
    python = python_with_vllm()
    settings = {
        "engine": {
            "kind": "vllm",
            "vllm.python": python,
            "vllm.args": ["--max-num-batched-tokens", str(STEP_TOKENS)],
            "hot_bytes": 512 * MIB,
            "max_context": 8192,
            "max_batch": 4,
            "dtype": "float32",
        },
        "store": {"codec": "auto", "accept_loss": False, "ram_bytes": 512 * MIB},
        "scheduler": {"idle_after_s": 3600.0},
    }
    with Stack(settings, start_timeout_s=900.0) as running:
        yield running


@pytest.fixture(scope="module")
def browser(stepping: Stack) -> Iterator[Browser]:
    with chromium() as launched:
        yield Browser(launched, stepping.url, wait_ms=WAIT_S * 1000)


def ask(url: str, num_words: int, session: str) -> None:
    model = asked(f"{url}/v1/models").content["data"][0]["id"]
    text = prose(session, num_words)
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    asked(f"{url}/v1/chat/completions", body, session=session, timeout_s=WAIT_S)


def test_how_far_a_prompt_is_read(stepping: Stack, browser: Browser):
    page = browser.open()
    page.get_by_role("tab", name=re.compile("^Now")).wait_for()
    asking = threading.Thread(target=ask, args=(stepping.url, 6000, "long"))
    asking.start()
    shown = page.get_by_role("img", name=re.compile(r"^[1-9]\d? % of the prompt$")).first
    shown.wait_for()
    read: list[int] = []
    while asking.is_alive():
        for request in asked(f"{stepping.url}/v1/snapshot").content["now"]["requests"]:
            read.append(request["prefilled_tokens"] or 0)
        page.wait_for_timeout(100)
    assert read == sorted(read), "it only grows"
    assert any(x and x % STEP_TOKENS == 0 for x in read)
    page.context.close()


def move_to_disk(page: Any) -> str:
    """Click until the disk has it, and return what the page says then.

    The long prompt goes to the disk first, and the engine waits 30 s for both: some disks are
    slower. A click may also miss, if the panel grows under the pointer.
    """
    said = page.locator(".said:not(.empty)")
    until = time.monotonic() + WAIT_S
    message = ""
    while time.monotonic() < until:
        said.wait_for(state="detached")  # of the click before
        page.get_by_role("button", name="Move to disk").click()
        clicked, words = time.monotonic(), list[str]()
        while not words and time.monotonic() < clicked + CLICK_S:
            page.wait_for_timeout(200)
            words = said.all_inner_texts()
        message = words[0] if words else "nothing"
        if not re.search("nothing|has not taken it|did not take all of it", message):
            break
    return message


def test_what_sleeps_is_made_ready_for_its_next_turn(stepping: Stack, browser: Browser):
    """vLLM fills blocks for a running request only: the page does not say that it is awake."""
    ask(stepping.url, 300, "ready")
    page = browser.open("sessions//ready")
    side = page.get_by_role("complementary")
    assert move_to_disk(page) == "ready sleeps now, in Disk."
    side.get_by_role("button", name="Wake").click()
    page.get_by_text(
        re.compile("ready is ready in (Packed )?RAM; this engine unpacks it")
    ).wait_for()
    browser.check()
    page.context.close()


def test_a_measurement_is_begun_by_a_click(browser: Browser):
    page = browser.open("quality")
    page.get_by_role("button", name="Measure now").click()
    page.get_by_text("The engine measures in its idle moments").wait_for()
    page.get_by_role("tabpanel").get_by_text(re.compile(r"\d+ of \d+")).first.wait_for()
    page.get_by_role("button", name="Measure now").wait_for(state="detached")
    browser.check()
    page.context.close()
