"""Control messages: a written message is read unchanged, and no other bytes are read."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.host.control_server import page_of
from engines.wire import (
    MAX_FRAME_BYTES,
    PAGE_BYTES,
    ControlReply,
    ControlRequest,
    Demote,
    Forget,
    GetStats,
    Hello,
    KVSize,
    ListSessions,
    Pin,
    Prefetch,
    Refused,
    SessionRef,
    SessionReport,
    Sessions,
    Unpin,
    WireError,
    absent,
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
    st.builds(ListSessions, after=st.none() | st.tuples(st.text(), st.text())),
    st.just(GetStats()),
)


def fed(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


@given(st.builds(ControlRequest, number=st.integers(0, 2**63 - 1), verb=verbs))
def test_requests_come_back_as_they_were(request: ControlRequest) -> None:
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
        frame(ControlReply(1, Refused("x" * MAX_FRAME_BYTES)))


async def test_a_torn_frame_is_an_end() -> None:
    whole = frame(ControlRequest(1, GetStats()))
    with pytest.raises(asyncio.IncompleteReadError):
        await read_request(fed(whole[:-1]))


# ---- lists of sessions


def reports(ids: list[str]) -> list[SessionReport]:
    return [absent(SessionRef("t", x, b"")) for x in ids]


def pages_of(everything: list[SessionReport]) -> list[Sessions]:
    pages = [page_of(everything, None)]
    while pages[-1].more:
        last = pages[-1].sessions[-1]
        pages.append(page_of(everything, (last.tenant, last.id)))
    return pages


def test_a_session_larger_than_a_page_is_a_page() -> None:
    everything = reports(["a", "b" + "x" * PAGE_BYTES, "c"])
    pages = pages_of(everything)
    assert [[x.id[0] for x in page.sessions] for page in pages] == [["a"], ["b"], ["c"]]


def test_a_list_goes_on_where_it_was_though_sessions_come_and_go() -> None:
    assert [x.id for x in page_of(reports(["e", "a", "c"]), ("t", "b")).sessions] == ["c", "e"]
    assert page_of(reports(["a"]), ("t", "a")) == Sessions([])
    assert page_of([], None) == Sessions([])


def test_sizes_of_kv_count_growing_windowed_and_fixed_parts():
    part = KVSize(100, ((10, 32),), 7)
    assert [part.of(n) for n in (0, 1, 32, 100)] == [0, 117, 3527, 10_327]
    both = part + KVSize(1, ((5, 64),), 3)
    assert both.of(100) == part.of(100) + 100 + 5 * 64 + 3
    assert sum([part, part], KVSize()).of(100) == 2 * part.of(100)
