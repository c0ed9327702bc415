"""Large bodies at once: memory stays in proportion to their bytes, and others are answered."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from tests.faults.test_http_edge import ask
from tests.faults.test_http_edge import posted as chat_of

MIB = 1 << 20
TOO_LONG = b"context_length_exceeded"  # the engine's word: the body came through
NUM_BODIES, BODY_BYTES = 12, 4 * MIB


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    with FakeStack(tmp_path_factory.mktemp("stack")) as running:
        yield running


def posted(stack: FakeStack, body: bytes) -> bytes:
    return ask(stack, chat_of(body, more=b"connection: close\r\n"))


def tiny_objects(nbytes: int) -> bytes:
    start = b'{"model": "%s", "messages": [], "x": [' % MODEL.encode()
    return start + b"{}," * ((nbytes - len(start)) // 3) + b"{}]}"


def one_text(nbytes: int) -> bytes:
    """A text of JSON: as a text it is one value."""
    text = '[{"a": 1}, ' * (nbytes // 13)
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": MODEL, "messages": messages}).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "code"),
    [(tiny_objects, b"too_many_values"), (one_text, TOO_LONG)],
    ids=["objects", "text"],
)
def test_memory_stays_in_proportion(stack: FakeStack, make: Callable[[int], bytes], code: bytes):
    body = make(BODY_BYTES)
    before, most, longest_s = stack.process.memory_info().rss, 0, 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal most, longest_s
        while not ended.wait(0.02):
            began = time.monotonic()
            assert stack.status("/livez") == 200
            longest_s = max(longest_s, time.monotonic() - began)
            most = max(most, stack.process.memory_info().rss)

    with ThreadPoolExecutor(NUM_BODIES + 1) as threads:
        watching = threads.submit(watch)
        answers = list(threads.map(lambda _: posted(stack, body), range(NUM_BODIES)))
        ended.set()
        watching.result()
    assert all(code in x or b"bodies_full" in x for x in answers)
    assert any(code in x for x in answers)
    assert most - before < 4 * NUM_BODIES * BODY_BYTES, most - before
    print(f"{(most - before) >> 20} MiB more, /livez {longest_s:.2f} s")


def test_bodies_beyond_the_budget_are_asked_to_come_back(tmp_path: Path):
    limits = {"max_bodies_bytes": 2 * MIB, "body_timeout_s": 30.0}
    with FakeStack(tmp_path, gateway=limits) as stack:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (3 * MIB // 2)
        with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as slow:
            slow.sendall(head + b"x" * MIB)
            time.sleep(0.3)
            refused = posted(stack, one_text(MIB))
            assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in refused
            assert b"bodies_full" in refused
            assert TOO_LONG in posted(stack, one_text(MIB // 4))
        time.sleep(0.3)  # the slow one has left: its bytes are given back
        assert TOO_LONG in posted(stack, one_text(MIB))
