"""Clicks on a session while its answer is streamed: it stays, and the page says why."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.stacks.fake_stack import MODEL
from tests.integration.dashboard.conftest import KEYS

pytestmark = pytest.mark.slow

CHUNKS = 120
WAIT_S = 60


class Stream:
    """An answer that comes slowly enough for a user to click meanwhile."""

    def __init__(self, url: str, session: str, delay_s: float) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "one two three"}],
            "stream": True,
            "metadata": {"fake": f"chunks={CHUNKS} delay_s={delay_s}"},
        }
        headers = {
            "authorization": f"Bearer {KEYS['alice'][0]}",
            "content-type": "application/json",
            "x-session-id": session,
        }
        self._request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        self.lines: list[bytes] = []
        self.began = threading.Event()
        self._has_left = False
        self._thread = threading.Thread(target=self._read)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()
        assert self.began.wait(WAIT_S)

    def leave(self) -> None:
        """Close the connection, as a client does that wants no more of the answer."""
        self._has_left = True
        self._thread.join(WAIT_S)

    def end(self) -> list[str]:
        """The words of the whole answer."""
        self._thread.join(WAIT_S)
        assert self.lines[-1] == b"data: [DONE]", "the answer was cut"
        choices = [c for x in self.lines[:-1] for c in json.loads(x[6:])["choices"]]
        assert choices[-1]["finish_reason"] is not None
        return [c["delta"]["content"] for c in choices if c["delta"].get("content")]

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=WAIT_S) as answer:
            for line in answer:
                if self._has_left:
                    return
                if line.startswith(b"data: "):
                    self.lines.append(line.strip())
                    self.began.set()


@contextmanager
def streamed(
    url: str, session: str, *, whole: bool = False, delay_s: float = 0.1
) -> Iterator[Stream]:
    """Stream an answer; ``whole``: read it to its end, which takes twelve seconds."""
    stream = Stream(url, session, delay_s)
    stream.start()
    yield stream
    if not whole:
        stream.leave()
    else:
        assert len(stream.end()) == CHUNKS


def test_what_answers_stays_hot_and_the_page_says_why(server, browser):
    with streamed(server.url, "in-use") as stream:
        page = browser.open("sessions//in-use", key=KEYS["alice"][0])
        side = page.get_by_role("complementary")
        why = side.get_by_text("It is answering, so it stays where it is")
        why.wait_for()
        sleep = side.get_by_role("button", name="Let it sleep")
        assert sleep.is_disabled()
        assert sleep.get_attribute("aria-describedby") == why.get_attribute("id")
        # A client that asks the server itself gets the same answer.
        status, code = page.evaluate(
            """async key => {
                const headers = { authorization: `Bearer ${key}` };
                headers["content-type"] = "application/json";
                const asked = { method: "POST", headers, body: "{}" };
                const answer = await fetch("/v1/sessions/in-use/demote", asked);
                return [answer.status, (await answer.json()).error.code];
            }""",
            KEYS["alice"][0],
        )
        assert (status, code) == (409, "session_busy")
        assert stream.is_running, "the answer ended before the click"
    why.wait_for(state="detached")
    sleep.click()
    side.get_by_role("button", name="Wake").wait_for()
    page.context.close()


def test_it_is_pinned_while_it_answers(server, browser):
    with streamed(server.url, "pinned-in-use") as stream:
        page = browser.open("sessions//pinned-in-use", key=KEYS["alice"][0])
        side = page.get_by_role("complementary")
        side.get_by_role("button", name="Pin", exact=True).click()
        side.get_by_role("button", name="Unpin").wait_for()
        assert stream.is_running, "the answer ended before the click"
    side.get_by_text("It is pinned, so it does not sleep.").wait_for()
    assert side.get_by_role("button", name="Let it sleep").is_disabled()
    side.get_by_role("button", name="Unpin").click()
    side.get_by_role("button", name="Let it sleep", disabled=False).click()
    side.get_by_role("button", name="Wake").wait_for()
    page.context.close()


def test_it_is_forgotten_while_it_answers_and_the_answer_ends_whole(server, browser):
    with streamed(server.url, "forgotten-in-use", whole=True) as stream:
        page = browser.open("sessions//forgotten-in-use", key=KEYS["alice"][0])
        side = page.get_by_role("complementary")
        side.get_by_text("It is answering").wait_for()
        side.get_by_role("button", name="Forget").click()
        side.get_by_role("button", name="Forget it").click()
        page.get_by_text("the answer on its way still comes to its end").wait_for()
        assert stream.is_running, "the answer ended before the click"
    page.goto(f"{server.url}/ui#sessions//forgotten-in-use")
    page.get_by_text("This session is gone").wait_for()
    page.context.close()


def test_a_new_session_is_shown_with_what_there_is_of_its_first_answer(server, browser):
    with streamed(server.url, "first-answer") as stream:
        page = browser.open("sessions", key=KEYS["alice"][0])
        row = page.get_by_role("row").filter(has_text="first-answer")
        cells = {
            name: row.locator(f".is-{name}") for name in ("tokens", "bytes", "client", "turns")
        }
        cells["tokens"].get_by_text(re.compile(r"^[1-9]\d+$")).wait_for()
        seen = int(cells["tokens"].inner_text())
        shown = {name: cell.inner_text() for name, cell in cells.items()}
        assert re.fullmatch(r"[1-9][\d.]* KiB", shown["bytes"])
        assert (shown["client"], shown["turns"]) == ("Python", "1")
        page.wait_for_function(
            "([at, seen]) => Number(document.querySelector(at).innerText) > seen",
            arg=["tr:has([data-at='0']) .is-tokens", seen],
        )
        assert stream.is_running
    page.context.close()


DRAWN = """
window.drawn = [];
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  window.drawn.push([text, Math.round(x), Math.round(y)]);
  return fill.apply(this, arguments);
};
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function () {
  window.drawn = [];
  return clear.apply(this, arguments);
};
"""


def labels(page):
    """The labels of both axes of the chart, as they are drawn now."""
    drawn = page.evaluate("window.drawn")
    lowest = max(y for _, _, y in drawn)
    return [x for x, _, y in drawn if y == lowest], [x for x, _, y in drawn if y != lowest]


@pytest.mark.parametrize("wait_ms", [0, 2500])
def test_no_label_of_the_chart_is_there_twice(server, browser, wait_ms):
    with streamed(server.url, f"labels-{wait_ms}"):
        page = browser.blank()
        page.add_init_script(DRAWN)
        page.goto(f"{browser.url}/ui")
        page.get_by_label("API key").fill(KEYS["alice"][0])
        page.get_by_role("button", name="Open").click()
        page.get_by_role("cell", name="answering").first.wait_for()
        page.wait_for_timeout(wait_ms)
        times, amounts = labels(page)
        assert len(times) == len(set(times)) >= 1, times
        assert len(amounts) == len(set(amounts)) >= 2, amounts
    page.context.close()


def test_speed_and_moves_are_there_when_a_page_is_loaded(server, browser):
    with streamed(server.url, "unseen", whole=True, delay_s=0.01):
        pass
    server.post("alice", "/v1/sessions/unseen/demote")
    page = browser.open(key=KEYS["alice"][0])
    moves = page.get_by_role("region", name="Moves").get_by_role("listitem")
    shown = moves.filter(has_text="unseen")
    shown.first.wait_for()
    words = [re.sub(r"\s+", " ", x) for x in shown.all_inner_texts()]
    assert len(words) == 2
    assert re.search(r"Hot ?→ to Packed RAM .* KiB, in bf16 .* KiB", words[0]), words
    assert re.search(r"new ?→ to Hot began with 1\d\d tokens", words[1]), words
    page.evaluate("location.reload()")
    shown.nth(1).wait_for()
    drawn = page.evaluate(
        """async () => {
            const modules = [...document.querySelectorAll("link[rel=modulepreload]")];
            const store = modules.find((x) => x.href.endsWith("live/store.js"));
            return (await import(store.href)).history.answer;
        }"""
    )
    assert any(drawn[:-1]), "the answers before the page was there"
    page.context.close()
