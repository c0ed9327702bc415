"""Bad input gets a 4xx in OpenAI's shape, fast, and costs no memory to speak of."""

from __future__ import annotations

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
    ],
    ids=[
        "nonsense",
        "no-host",
        "no-host-for-health",
        "smuggling",
        "long-header",
        "many-headers",
        "long-path",
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
