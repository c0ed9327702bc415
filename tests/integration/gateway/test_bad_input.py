"""Bad input gets a 4xx in OpenAI's shape, fast, and costs no memory to speak of."""

from __future__ import annotations

import gzip
import io
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
FAST_S = 20.0  # on a machine that does other things too
MIB = 1 << 20


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    limits = {"max_body_bytes": 4 * MIB, "body_timeout_s": 1.0}
    with FakeStack(tmp_path_factory.mktemp("stack"), gateway=limits) as running:
        yield running


async def post(stack: FakeStack, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and the error; asserts shape and speed, and that the server goes on."""
    data = io.BytesIO(body) if isinstance(body, bytes) else body
    began = time.monotonic()
    async with (
        aiohttp.ClientSession() as http,
        http.post(stack.url + CHAT, data=data, headers={**JSON, **headers}) as answer,
    ):
        said = await answer.json()
    assert time.monotonic() - began < FAST_S
    error = said.get("error", {})
    if answer.status != 200:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and len(error["message"]) < 1000
    return answer.status, error


def chat(**fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"n": "two"}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"top_logprobs": 10**6, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": "x" * 100_000}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"seed": 2**100}, "seed"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}] * 100_000}, "messages"),
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"session_id": "a\nb"}, "session_id"),
        ({"session_id": ["a"]}, "session_id"),
        ({"conversation": 5}, "conversation"),
    ],
)
async def test_bad_fields(stack: FakeStack, fields: dict[str, Any], param: str) -> None:
    status, error = await post(stack, chat(**fields))
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"[]",
        b"null",
        b'"x"',
        b'{"model": ',
        b'{"a": NaN}',
        b'{"temperature": 1e999}',
        b"\xff\xfe{",
        b'{"a": "\xff"}',
        b"[" * 1_000_000,
        b'{"a":' * 200_000,
    ],
    ids=range(12),
)
async def test_bodies_that_are_no_json_object(stack: FakeStack, body: bytes) -> None:
    status, error = await post(stack, body)
    assert (status, error["type"]) == (400, "invalid_request_error")


async def test_an_unknown_model(stack: FakeStack) -> None:
    status, error = await post(stack, chat(model="x" * 400))
    assert (status, error["code"]) == (404, "model_not_found")


async def test_encodings(stack: FakeStack) -> None:
    bomb = gzip.compress(b"x" * 500 * MIB)
    before = stack.process.memory_info().rss
    for _ in range(4):
        assert (await post(stack, bomb, **{"content-encoding": "gzip"}))[0] == 413
    assert stack.process.memory_info().rss - before < 32 * MIB
    assert (await post(stack, bomb, **{"content-encoding": "br"}))[0] == 415
    assert (await post(stack, chat(), **{"content-type": "text/plain"}))[0] == 415


async def test_a_body_of_100_megabytes_leaves_memory_flat(stack: FakeStack) -> None:
    await post(stack, chat())
    before = stack.process.memory_info().rss

    async def pieces() -> Any:  # chunked: no length is declared
        for _ in range(100):
            yield b"x" * MIB

    status, error = await post(stack, pieces())
    assert (status, error["code"]) == (413, "body_too_large")
    assert (await post(stack, b"x" * 100 * MIB))[0] == 413
    assert stack.process.memory_info().rss - before < 32 * MIB


async def test_the_server_still_serves(stack: FakeStack) -> None:
    assert (await post(stack, chat()))[0] == 200


# ---- below HTTP


def raw(stack: FakeStack, *pieces: bytes, end: bytes = b"\0") -> bytes:
    """All that the server answers, up to ``end`` or until it closes the connection."""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=FAST_S) as sock:
        said = b""
        try:
            for piece in pieces:
                sock.sendall(piece)
            while not said.endswith(end) and (piece := sock.recv(65536)):
                said += piece
        except (TimeoutError, ConnectionError):
            pass
    return said


CLOSE = b"host: localhost\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /version HTTP/1.1\r\nconnection: close\r\n\r\n", b"400"),  # no Host
        (b"GET /livez HTTP/1.0\r\n\r\n", b"200"),  # as load balancers check
        (
            b"POST /v1/models HTTP/1.1\r\n"
            + CLOSE
            + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"400",
        ),
        (b"GET /livez HTTP/1.1\r\n" + CLOSE + b"a: " + b"x" * 64_000 + b"\r\n\r\n", b"431"),
        (b"GET /livez HTTP/1.1\r\n" + CLOSE + b"a: b\r\n" * 20_000 + b"\r\n", b"431"),
        (b"GET /" + b"x" * 64_000 + b" HTTP/1.1\r\n" + CLOSE + b"\r\n", b"431"),
        (b"GET /livez HTTP/1.0\r\nhost: localhost\r\n\r\n", b"200"),
    ],
    ids=[
        "nonsense",
        "no-host",
        "no-host-for-health",
        "smuggling",
        "long-header",
        "many-headers",
        "long-path",
        "http-1.0",
    ],
)
def test_heads(stack: FakeStack, request_bytes: bytes, status: bytes) -> None:
    assert raw(stack, request_bytes).startswith(b"HTTP/1.1 " + status)


def test_a_head_that_never_ends_is_cut(stack: FakeStack) -> None:
    assert raw(stack, b"GET /livez HTTP/1.1\r\nhost: loc").startswith(b"HTTP/1.1 408")
    assert raw(stack, b"").startswith(b"HTTP/1.1 408")  # nothing at all


def test_a_head_in_small_pieces_is_bounded(stack: FakeStack) -> None:
    pieces = [b"GET /livez HTTP/1.1\r\n" + CLOSE + b"a: "] + [b"x" * 1024] * 200
    assert raw(stack, *pieces)[:12] in (b"HTTP/1.1 431", b"")  # or reset before it was read


def test_a_body_that_never_ends_is_cut(stack: FakeStack) -> None:
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\n" + CLOSE
    head += b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    assert raw(stack, head).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_an_offer_to_upgrade_is_ignored(stack: FakeStack, protocol: bytes) -> None:
    head = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: "
    assert raw(stack, head + protocol + b"\r\n\r\n", end=b"}").startswith(b"HTTP/1.1 200")
    log = stack.log.read_text()
    assert "pip install" not in log and "upgrade" not in log.lower()


def test_two_requests_on_one_connection_after_a_pause(stack: FakeStack) -> None:
    """The head's clock starts with the first byte of a head, not with the connection."""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=FAST_S) as sock:
        for _ in range(2):
            sock.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            said = b""
            while not said.endswith(b"}"):  # head and body may come apart
                piece = sock.recv(65536)
                assert piece, "the server closed a connection that was kept alive"
                said += piece
            assert said.startswith(b"HTTP/1.1 200")
            time.sleep(1.2)
