"""What is in use loses nothing: a session is acted on while the real engine answers it.

Gateway and mlx engine are processes, the model is tiny and random, and greedy: so an answer that
was disturbed is not the one that the same prompt gets undisturbed.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.stacks.product_stack import Stack
from gateway.keys import generate_key
from tests.asking import asked
from tests.waiting import until

pytestmark = [pytest.mark.mlx, pytest.mark.slow]

ADMIN = generate_key("root")
SOON = 3  # events of the answer that are read before the test acts
WAIT_S = 60
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "tell me of rivers and of stones " * 20}],
    "max_tokens": 1000,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class Server:
    """The product, with its admin's key."""

    def __init__(self, stack: Stack) -> None:
        self.url = stack.url

    def ask(self, method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
        answer = asked(self.url + path, body, method=method, key=key)
        return answer.status, answer.content

    def new_key(self) -> tuple[str, str]:
        """A key of the tenant, and the key's id."""
        status, made = self.ask("POST", "/admin/keys", ADMIN[0], {"tenant": "alice"})
        assert status == 201, made
        return made["key"], made["id"]

    def still_answers(self) -> bool:
        """Whether a request is in flight; the figures may be a second old."""
        for _ in range(15):
            if self.ask("GET", "/v1/snapshot", ADMIN[0])[1]["now"]["running"]:
                return True
            time.sleep(0.1)
        return False

    def answer(
        self, key: str, session: str, act: Callable[[], None] | None = None, **fields: Any
    ) -> list[Any]:
        """A whole streamed answer; ``act`` is done in the midst of it."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        headers["x-session-id"] = session
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps({**BODY, **fields}).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            events, acted = [], act is None
            for line in answer:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                if len(events) >= SOON and not acted:
                    acted = True
                    act()
                    assert self.still_answers(), "the answer ended before the test acted"
                if line.startswith(b"data: [DONE]"):
                    return events
        raise AssertionError("the answer has no end")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.integration.tiny_models import write_model

    folder = tmp_path_factory.mktemp("model")
    write_model("llama", folder)
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(0o600)
    keys.write_text(generate_key("bob")[1] + "\n")
    settings = {
        "engine": {"kind": "mlx", "model": str(folder), "served_model_name": "tiny"},
        "gateway": {"api_keys_file": str(keys), "admin_keys": [ADMIN[1]]},
        "store": {"ram_bytes": 64 << 20, "disk_bytes": 64 << 20},
        "scheduler": {"idle_after_s": 3600.0},
    }
    with Stack(settings) as stack:
        yield Server(stack)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Any]:
    events = server.answer(server.new_key()[0], "undisturbed")
    assert events[-1]["usage"]["completion_tokens"] == BODY["max_tokens"]
    return events


def text_of(events: list[Any]) -> tuple[str, str, int]:
    """What was said, how it ended, how many tokens it was."""
    choices = [x for event in events for x in event["choices"]]
    said = "".join(x["delta"].get("content") or "" for x in choices)
    (end,) = {x["finish_reason"] for x in choices} - {None}
    assert not [x for x in events if "error" in x]
    return said, end, events[-1]["usage"]["completion_tokens"]


VERBS = [
    ("POST", "/demote", {}, 409),
    ("POST", "/demote", {"tier": "disk"}, 409),
    ("POST", "/pin", {}, 200),
    ("POST", "/unpin", {}, 200),
    ("POST", "/prefetch", {}, 200),
    ("DELETE", "", None, 200),
]


@pytest.mark.parametrize(
    "verbs",
    [VERBS[:-1], VERBS[-1:], *(pytest.param([x], marks=pytest.mark.thorough) for x in VERBS[:-1])],
)
def test_a_running_answer_is_not_disturbed(server, undisturbed, verbs):
    key, session = server.new_key()[0], "acted-on"
    # What is acted on has a hot copy and a cold one already.
    server.answer(key, session, max_tokens=8)

    def act() -> None:
        for method, verb, body, status in verbs:
            answered, said = server.ask(method, f"/v1/sessions/{session}{verb}", key, body)
            assert answered == status, said

    assert text_of(server.answer(key, session, act)) == text_of(undisturbed)


def test_a_session_that_was_forgotten_while_it_answered_is_gone_with_what_it_saved(
    server: Server, undisturbed: list[Any]
):
    key, path = server.new_key()[0], "/v1/sessions/gone"

    def act() -> None:
        assert server.ask("DELETE", path, key)[0] == 200
        assert server.ask("GET", path, key)[0] == 404

    assert text_of(server.answer(key, "gone", act)) == text_of(undisturbed)

    def listed() -> list[str]:
        return [x["id"] for x in server.ask("GET", "/v1/snapshot", ADMIN[0])[1]["sessions"]]

    until(lambda: "gone" not in listed(), WAIT_S)  # a sweep removes the blobs saved at its end
    assert server.ask("GET", path, key)[0] == 404


def test_a_key_that_is_revoked_ends_nothing_that_it_began(server: Server, undisturbed: list[Any]):
    key, key_id = server.new_key()

    def act() -> None:
        assert server.ask("DELETE", f"/admin/keys/{key_id}", ADMIN[0])[0] == 200
        assert server.ask("GET", "/v1/sessions", key)[0] == 401

    assert text_of(server.answer(key, "revoked", act)) == text_of(undisturbed)
    assert server.ask("POST", "/v1/chat/completions", key, BODY)[0] == 401
