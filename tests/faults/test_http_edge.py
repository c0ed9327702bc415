"""Clients without a key that send too much, too slowly, too many at once, or in two meanings."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPResponse
from pathlib import Path

import pytest

from benchmarks.stacks.fake_stack import MODEL, FakeStack
from tests.waiting import until

CHAT = b"/v1/chat/completions"
HOST = b"host: localhost\r\n"
JSON = HOST + b"content-type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
MIB = 1 << 20
BODY_TIMEOUT_S = 1.0
STALL_S = 1.0
LINGER_S = 5.0  # gateway.edge.connections
PER_ADDRESS = 40


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeStack]:
    limits = {"body_timeout_s": BODY_TIMEOUT_S, "client_stall_s": STALL_S}
    limits["max_connections"] = 400
    with FakeStack(tmp_path_factory.mktemp("stack"), gateway=limits) as running:
        yield running


def connect(stack: FakeStack) -> socket.socket:
    return socket.create_connection(("127.0.0.1", stack.port), timeout=60)


def said(sock: socket.socket) -> bytes:
    """All that the server says until it ends the connection."""
    answer = b""
    try:
        while piece := sock.recv(65536):
            answer += piece
    except (TimeoutError, ConnectionError):
        pass
    return answer


def ask(stack: FakeStack, request: bytes) -> bytes:
    with connect(stack) as sock:
        sock.sendall(request)
        return said(sock)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def posted(body: bytes, version: bytes = b"1.1", more: bytes = b"") -> bytes:
    """A chat as it is sent; ``more``: lines of its head."""
    head = b"POST " + CHAT + b" HTTP/" + version + b"\r\n" + more + JSON
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def chat(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "hi"}]
    return json.dumps({"model": MODEL, "messages": messages, **fields}).encode()


# ---- trailers


@pytest.mark.parametrize("line", [b"a:b\r\n", b"a:" + b"x" * MIB], ids=["many", "endless"])
def test_trailers_take_no_memory(stack: FakeStack, line: bytes) -> None:
    before = stack.process.memory_info().rss
    head = b"GET /livez HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n0\r\n"
    piece = line * (MIB // len(line) or 1)
    with connect(stack) as sock, pytest.raises(OSError):  # cut on the way
        sock.sendall(head)
        for _ in range(1024):
            sock.sendall(piece)
            assert stack.process.memory_info().rss - before < 16 * MIB


def test_a_trailer_is_no_header(stack: FakeStack) -> None:
    body = chat()
    request = b"POST " + CHAT + b" HTTP/1.1\r\nconnection: close\r\n" + JSON + CHUNKED + b"\r\n"
    request += b"%x\r\n%s\r\n0\r\nx-session-id: from-a-trailer\r\n\r\n" % (len(body), body)
    answer = ask(stack, request)
    assert status(answer) == 200
    assert b"from-a-trailer" not in answer
    assert stack.status("/v1/sessions/from-a-trailer") == 404


def test_chunk_extensions_are_bounded(stack: FakeStack) -> None:
    head = b"POST " + CHAT + b" HTTP/1.1\r\n" + JSON + CHUNKED + b"\r\n1;"
    answer = ask(stack, head + b"x" * 600_000)
    assert status(answer) == 400 and b"framing_too_large" in answer


# ---- clients that never end


BODY_TO_COME = b"content-length: 1000000\r\n\r\n"
DRIPPING = {
    "after 200": b"GET /livez HTTP/1.1\r\n" + HOST + BODY_TO_COME,
    "trailers": b"GET /livez HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n0\r\n",
    "body": b"POST " + CHAT + b" HTTP/1.1\r\n" + JSON + BODY_TO_COME,
    "after 404": b"POST /nowhere HTTP/1.1\r\n" + JSON + BODY_TO_COME,
    "after 400": b"GET /livez HTTP/1.1\r\n" + HOST + HOST + BODY_TO_COME,
}


@pytest.mark.slow
def test_clients_that_drip_are_cut(stack: FakeStack) -> None:
    """Each sends a byte now and then, after an answer or before it."""
    with ExitStack() as held:
        left = {name: held.enter_context(closing(connect(stack))) for name in DRIPPING}
        for name, sock in left.items():
            sock.sendall(DRIPPING[name])
        end = time.monotonic() + BODY_TIMEOUT_S + LINGER_S + 30.0
        while left and time.monotonic() < end:
            left = {name: sock for name, sock in left.items() if takes_a_byte(sock)}
            time.sleep(0.05)
    assert list(left) == []


def takes_a_byte(sock: socket.socket) -> bool:
    try:
        sock.sendall(b"x")
    except OSError:
        return False
    return True


def num_ended(stack: FakeStack) -> Counter[str]:
    """Connections that the server ended, by reason."""
    found = re.findall(r'connections_ended_total{reason="(\w+)"} (\d+)', metrics(stack))
    return Counter({reason: int(number) for reason, number in found})


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_cut(stack: FakeStack) -> None:
    """Answers that are asked for and never read: nothing piles up, and the connection ends."""
    request = b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"
    before, ended_before = stack.process.memory_info().rss, num_ended(stack)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(STALL_S + 30.0)
        sock.connect(("127.0.0.1", stack.port))
        end = time.monotonic() + STALL_S + 60.0
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                sock.sendall(request * 2)
                for _ in range(4):  # until these two are answered, however busy the machine is
                    metrics(stack)
                assert stack.process.memory_info().rss - before < 16 * MIB
    assert num_ended(stack) - ended_before == {"reader_stalled": 1}


# ---- many connections


def test_idle_connections_make_room_for_active_ones(stack: FakeStack) -> None:
    quiet = [seconds_of_a_chat(stack) for _ in range(15)]
    with ExitStack() as idle:
        for _ in range(600):  # half as many again as may be open
            idle.enter_context(closing(connect(stack)))
        crowded = [seconds_of_a_chat(stack) for _ in range(15)]
    assert min(crowded) < 2 * min(quiet) + 0.01  # a busy machine makes some of them slower
    assert 'thermocline_connections_ended_total{reason="idle"}' in metrics(stack)
    log = stack.log.read_text()
    assert "connections were ended" in log and "Traceback" not in log


def test_idle_connections_within_the_limit_stay_and_cost_the_others_nothing(tmp_path: Path) -> None:
    """Compared is the gateway's CPU time for a chat, which other programs do not change."""
    number = 600
    with (
        FakeStack(tmp_path, gateway={"max_connections": number + 50}) as stack,
        ExitStack() as held,
    ):
        gateway = stack.process
        seconds_of_a_chat(stack)
        alone_s, before = cpu_of_chats(stack), gateway.memory_info().rss
        idle = [held.enter_context(closing(connect(stack))) for _ in range(number)]
        for sock in idle[::10]:
            sock.sendall(b"GET /livez HTTP/1.1\r\n")
        beside_s, after = cpu_of_chats(stack), gateway.memory_info().rss
        assert beside_s < 2 * alone_s + 0.1
        assert after - before < number * 32 << 10
        assert "connections_ended_total{" not in metrics(stack)
        for sock in idle[1::100]:
            sock.sendall(GET + HOST + b"\r\n")
            assert status(said(sock)) == 200


def cpu_of_chats(stack: FakeStack) -> float:
    """Seconds of processor time that the gateway takes for some chats."""
    before = sum(stack.process.cpu_times()[:2])
    for _ in range(30):
        seconds_of_a_chat(stack)
    return float(sum(stack.process.cpu_times()[:2]) - before)


def seconds_of_a_chat(stack: FakeStack) -> float:
    request = posted(chat(metadata={"fake": "chunks=5"}), more=b"connection: close\r\n")
    began = time.perf_counter()
    answer = ask(stack, request)
    assert status(answer) == 200
    return time.perf_counter() - began


def metrics(stack: FakeStack) -> str:
    return ask(stack, b"GET /metrics HTTP/1.1\r\nconnection: close\r\n" + HOST + b"\r\n").decode()


def test_one_address_gets_so_many_connections_and_no_more(tmp_path: Path) -> None:
    limits = {"max_connections_per_address": PER_ADDRESS, "trusted_proxies": []}
    with FakeStack(tmp_path, gateway=limits) as stack, ExitStack() as held:
        for _ in range(PER_ADDRESS):
            sock = held.enter_context(closing(connect(stack)))
            sock.sendall(b"GET /livez HTTP/1.1\r\n")  # a head that has begun
        time.sleep(0.2)
        answer = ask(stack, b"")
        assert status(answer) == 503 and b"too_many_connections" in answer
        other = socket.create_connection(
            ("127.0.0.1", stack.port), timeout=10, source_address=("127.0.0.2", 0)
        )
        with other:
            other.sendall(b"GET /livez HTTP/1.1\r\nconnection: close\r\n" + HOST + b"\r\n")
            assert status(said(other)) == 200


# ---- what may be read in two ways

GET = b"GET /livez HTTP/1.1\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "wanted"),
    [
        (GET + HOST + HOST + b"\r\n", 400),
        (GET + HOST + b"host: evil.example\r\n\r\n", 400),
        (GET.replace(b"/livez", b"http://evil.example/livez") + HOST + b"\r\n", 400),
        (GET.replace(b"/livez", b"http://localhost:1/livez") + HOST + b"\r\n", 400),
        (GET.replace(b"/livez", b"http://localhost/livez") + HOST + b"\r\n", 200),
        (GET.replace(b"/livez", b"ftp://localhost/livez") + HOST + b"\r\n", 400),
        (b"CONNECT localhost:443 HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (GET.replace(b"1.1", b"1.0") + HOST + CHUNKED + b"\r\n0\r\n\r\n", 400),
        (GET + HOST + b"transfer-encoding: identity\r\n\r\n", 400),
        (GET + HOST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
        (GET + HOST + b"content-length: 1\r\ncontent-length: 2\r\n\r\nx", 400),
        (GET + HOST + b"content-length : 1\r\n\r\nx", 400),
        (GET + HOST + b"a: b\r\n c\r\n\r\n", 400),
    ],
)
def test_two_meanings(stack: FakeStack, request_bytes: bytes, wanted: int) -> None:
    assert status(ask(stack, request_bytes)) == wanted


# ---- order


def test_nothing_is_written_into_an_answer_that_goes_on(stack: FakeStack) -> None:
    """Garbage, and a head that is late, after a request whose stream is running."""
    request = posted(chat(stream=True, metadata={"fake": "chunks=100 delay_s=0.02"}))
    for extra in (b"nonsense\r\n\r\n", b"GET /livez HT"):
        with connect(stack) as sock:
            sock.sendall(request)
            answer = sock.recv(65536)
            sock.sendall(extra)
            answer += said(sock)
        assert answer.count(b"HTTP/1.1 ") == 1 and status(answer) == 200


def test_pipelined_requests_are_answered_in_order(stack: FakeStack) -> None:
    one = b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n"
    answer = ask(
        stack, one * 4 + b"GET /nowhere HTTP/1.1\r\nconnection: close\r\n" + HOST + b"\r\n"
    )
    assert [int(x[:3]) for x in answer.split(b"HTTP/1.1 ")[1:]] == [200, 200, 200, 200, 404]


# ---- half closed


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_half_closed_request_gets_its_answer(stack, stream, version):
    request = posted(chat(stream=stream, metadata={"fake": "chunks=3 delay_s=0.3"}), version)
    with connect(stack) as sock:
        # Request and end in one segment: a busy machine must not let the answer begin between them.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        answer = said(sock)
    assert status(answer) == 200 and answer.count(b"HTTP/1.1") == 1
    end = b"data: [DONE]\n\n" + (b"\r\n0\r\n\r\n" if version == b"1.1" else b"")
    assert b"choices" in answer and (not stream or answer.endswith(end))


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_is_gone_is_not_taken_for_half_closed(stack, version):
    with connect(stack) as sock:
        sock.sendall(posted(chat(metadata={"fake": "chunks=500 delay_s=0.05"}), version))
        time.sleep(0.2)
        assert "thermocline_turns_running 1.0" in metrics(stack)
    time.sleep(1.0)
    assert "thermocline_turns_running 0.0" in metrics(stack)


def test_a_client_that_half_closes_in_mid_stream_gets_the_rest(stack: FakeStack) -> None:
    with connect(stack) as sock:
        sock.sendall(posted(chat(stream=True, metadata={"fake": "chunks=3 delay_s=0.6"})))
        answer = HTTPResponse(sock)
        answer.begin()
        first = answer.readline()
        sock.shutdown(socket.SHUT_WR)
        rest = answer.read()
    assert answer.status == 200 and first.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")


def test_a_client_that_is_gone_in_mid_stream_ends_its_turn(stack: FakeStack) -> None:
    """Also between two chunks that come long after each other, as while a prompt is read."""
    with connect(stack) as sock:
        sock.sendall(posted(chat(stream=True, metadata={"fake": "chunks=3 delay_s=30"})))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        assert "thermocline_turns_running 1.0" in metrics(stack)
    until(lambda: "thermocline_turns_running 0.0" in metrics(stack), 10.0)


# ---- HTTP/1.0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_old_client_gets_no_chunks_and_the_connections_end(stack, stream):
    answer = ask(stack, posted(chat(stream=stream), b"1.0", b"expect: 100-continue\r\n"))
    head, _, text = answer.partition(b"\r\n\r\n")
    assert status(head) == 200
    assert b"transfer-encoding" not in head and b"connection: close" in head
    if stream:
        assert b"x-accel-buffering: no" in head and b"content-length" not in head
        assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")
    else:
        assert b"content-length: %d\r\n" % len(text) in head + b"\r\n"
        assert json.loads(text)["choices"]


@pytest.mark.parametrize("path", [b"/dashboard", b"/v1/models", b"/metrics", b"/nowhere"])
def test_an_old_client_gets_every_answer_whole(stack: FakeStack, path: bytes) -> None:
    request = b"GET " + path + b" HTTP/1.0\r\n" + HOST + b"\r\n"
    head, _, text = ask(stack, request).partition(b"\r\n\r\n")
    assert status(head) in (200, 307, 404) and b"chunked" not in head
    assert b"content-length: %d\r\n" % len(text) in head + b"\r\n"
    head_only = ask(stack, request.replace(b"GET", b"HEAD"))
    assert head_only.partition(b"\r\n\r\n")[2] == b""
