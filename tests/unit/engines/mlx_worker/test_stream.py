from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable

import pytest

from engines.mlx_worker.generation import Event, Failed, Finished, Token
from engines.mlx_worker.stream import EventStream, Outbox


async def everything(stream: EventStream) -> list[Event]:
    return [event async for event in stream.events()]


async def test_a_stream_ends_after_its_last_row() -> None:
    stream = EventStream(2, lambda row: None)
    outbox = Outbox(asyncio.get_running_loop())
    events: list[Event] = [Token(0, 5), Finished(0, "stop"), Token(1, 6), Finished(1, "length")]
    for event in events:
        outbox.put(stream, event)
    outbox.send()
    assert await asyncio.wait_for(everything(stream), 5) == events


async def test_a_failure_ends_all_rows() -> None:
    stream = EventStream(3, lambda row: None)
    stream.deliver(Failed("no"))
    assert await asyncio.wait_for(everything(stream), 5) == [Failed("no")]


async def read_to_the_end(stream: EventStream) -> None:
    stream.deliver(Finished(0, "stop"))
    await everything(stream)


async def read_a_failure(stream: EventStream) -> None:
    stream.deliver(Failed("no"))
    await everything(stream)


async def cancel(stream: EventStream) -> None:
    stream.cancel()


@pytest.mark.parametrize("end", [read_to_the_end, read_a_failure, cancel])
async def test_a_stream_that_is_over_does_not_hold_its_request(
    end: Callable[[EventStream], Awaitable[None]],
) -> None:
    asked: list[int | None] = []

    def stop(row: int | None) -> None:
        asked.append(row)

    held = weakref.ref(stop)
    stream = EventStream(1, stop)
    del stop
    stream.stop_row(0)
    assert asked == [0]
    await end(stream)
    assert held() is None
    stream.stop_row(0)  # too late, and harmless


async def test_events_of_another_thread_arrive_in_order() -> None:
    stream = EventStream(1, lambda row: None)
    outbox = Outbox(asyncio.get_running_loop())

    def owner() -> None:
        for i in range(200):
            outbox.put(stream, Token(0, i))
            if i % 7 == 0:
                outbox.send()
        outbox.put(stream, Finished(0, "length"))
        outbox.send()

    thread = threading.Thread(target=owner)
    thread.start()
    events = await asyncio.wait_for(everything(stream), 5)
    thread.join()
    assert [x.id for x in events if isinstance(x, Token)] == list(range(200))


async def test_stopping_reaches_the_owner() -> None:
    stopped: list[int | None] = []
    stream = EventStream(2, stopped.append)
    stream.stop_row(1)
    stream.cancel()
    assert stopped == [1, None]
