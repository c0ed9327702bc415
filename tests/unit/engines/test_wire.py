"""Control messages: what is written is what is read, and nothing else is."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.wire import (
    MAX_FRAME_BYTES,
    Demote,
    Forget,
    GetStats,
    Hello,
    ListSessions,
    Pin,
    Prefetch,
    Refused,
    Reply,
    Request,
    SessionRef,
    Unpin,
    WireError,
    frame,
    read_from_engine,
    read_request,
)

refs = st.builds(SessionRef, tenant=st.text(), id=st.text(), salt=st.binary(max_size=64))
verbs = st.one_of(
    st.builds(Hello, token=st.text()),
    st.builds(Demote, session=refs, tier=st.sampled_from([None, "ram", "disk", "redis"])),
    st.builds(Prefetch, session=refs),
    st.builds(Pin, session=refs),
    st.builds(Unpin, session=refs),
    st.builds(Forget, session=refs),
    st.just(ListSessions()),
    st.just(GetStats()),
)


def fed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


@given(st.builds(Request, number=st.integers(0, 2**63 - 1), verb=verbs))
def test_requests_come_back_as_they_were(request: Request) -> None:
    async def check() -> None:
        assert await read_request(fed(frame(request))) == request

    asyncio.run(check())


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error(body: bytes) -> None:
    async def check() -> None:
        data = len(body).to_bytes(4, "big") + body
        with pytest.raises(WireError):
            await read_from_engine(fed(data))

    asyncio.run(check())


async def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="over"):
        await read_request(fed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))
    with pytest.raises(WireError, match="over"):
        frame(Reply(1, Refused("x" * MAX_FRAME_BYTES)))


async def test_a_torn_frame_is_an_end() -> None:
    whole = frame(Request(1, GetStats()))
    with pytest.raises(asyncio.IncompleteReadError):
        await read_request(fed(whole[:-1]))
