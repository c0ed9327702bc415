"""Headers between gateway and engine, bounded bodies, and clients that leave."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from engines.http import (
    PATIENCE_HEADER,
    SALT_HEADER,
    SESSION_HEADER,
    CacheOutcome,
    ClientGone,
    patience_from,
    patience_header,
    read_body,
    session_from,
    session_headers,
    while_client_stays,
)
from engines.openai.errors import InvalidRequest
from kvstore.session import SessionRef

OUTCOMES = {
    "miss; tokens=0; reason=never-stored": CacheOutcome("miss", 0, "never-stored"),
    "hot; tokens=40": CacheOutcome("hot", 40),
    "cold-redis; tokens=7; reason=diverged": CacheOutcome("cold-redis", 7, "diverged"),
}


@pytest.mark.parametrize(("header", "outcome"), OUTCOMES.items())
def test_an_outcome_is_read_as_it_was_written(outcome: CacheOutcome, header: str) -> None:
    assert outcome.header() == header
    assert CacheOutcome.parse(header) == outcome


def test_an_outcome_without_a_number_is_read() -> None:
    assert CacheOutcome.parse("miss") == CacheOutcome("miss", 0)


NO_OUTCOMES = ["", "warm; tokens=1", "cold-None; tokens=1", 'hot"; tokens=1', "hot; tokens=x"]
NO_OUTCOMES += ["hot; tokens=1\n", "hot; tokens=1; reason=UPPER", "hot; tokens=1; reason=a b"]


@pytest.mark.parametrize("text", [*NO_OUTCOMES, "hot; tokens=" + "9" * 5000])
def test_anything_else_is_no_outcome(text: str) -> None:
    assert CacheOutcome.parse(text) is None


@given(
    st.builds(
        SessionRef,
        tenant=st.from_regex(r"[a-zA-Z0-9._-]{1,20}", fullmatch=True),
        id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        salt=st.binary(max_size=32),
    )
)
def test_a_session_is_read_as_it_was_written(session: SessionRef) -> None:
    headers = session_headers(session)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert session_from(headers) == session


def test_a_request_without_the_header_has_no_session_and_an_odd_salt_is_refused() -> None:
    assert session_from({}) is None
    assert session_from({SESSION_HEADER: "", SALT_HEADER: "00"}) is None
    with pytest.raises(InvalidRequest, match=SALT_HEADER):
        session_from({SESSION_HEADER: "s", SALT_HEADER: "xx"})


@given(st.floats(0, 1e6))
def test_patience_is_read_as_it_was_written(seconds: float) -> None:
    assert patience_from(patience_header(seconds)) == pytest.approx(seconds, abs=1e-3)


def test_patience_that_is_over_is_none_at_all_and_other_words_are_refused() -> None:
    assert patience_from(patience_header(-5.0)) == 0.0
    assert patience_from({}) is None
    for word in ("", "-1", "nan", "inf", "1e9", "soon"):
        with pytest.raises(InvalidRequest, match=PATIENCE_HEADER):
            patience_from({PATIENCE_HEADER: word})


def request(*chunks: bytes, declared: int | None = None, leaves: bool = False) -> Request:
    messages: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": leaves or i < len(chunks) - 1}
        for i, chunk in enumerate(chunks)
    ]
    if leaves:
        messages.append({"type": "http.disconnect"})

    async def receive() -> Message:
        return messages.pop(0)

    headers = [] if declared is None else [(b"content-length", b"%d" % declared)]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def test_a_body_up_to_the_limit_is_read() -> None:
    assert await read_body(request(b"ab", b"", b"cd", declared=4), 4) == b"abcd"


@pytest.mark.parametrize("declared", [None, 3, 5])
async def test_a_larger_one_is_refused(declared: int | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await read_body(request(b"abc", b"de", declared=declared), 4)
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


async def test_a_client_that_leaves_in_mid_body_is_noticed() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(request(b"abc", leaves=True), 4)


class Connection:
    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize("leaves", [True, False])
async def test_work_is_cancelled_when_the_client_leaves_or_its_caller_is(leaves: bool) -> None:
    connection, begun, ended = Connection(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    working = asyncio.create_task(while_client_stays(connection.receive, work))
    await begun.wait()
    if leaves:
        connection.left.set()
    else:
        working.cancel()
    with pytest.raises(ClientGone if leaves else asyncio.CancelledError):
        await working
    assert ended.is_set()


async def test_work_gives_its_result_or_its_error_while_the_client_stays() -> None:
    async def work(then: float = 7) -> float:
        await asyncio.sleep(0)
        return 1 / then

    assert await while_client_stays(Connection().receive, work) == 1 / 7
    with pytest.raises(ZeroDivisionError):
        await while_client_stays(Connection().receive, lambda: work(0))
