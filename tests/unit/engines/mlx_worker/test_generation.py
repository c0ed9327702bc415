from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from engines.mlx_worker.generation import Event, EventBuffer, EventQueue, Failed, Finished, Token


async def everything(stream: EventQueue) -> list[Event]:
    return [event async for event in stream.events()]


async def test_a_stream_ends_after_its_last_answer() -> None:
    stream = EventQueue(2, lambda index: None)
    buffer = EventBuffer(asyncio.get_running_loop())
    events: list[Event] = [Token(0, 5), Finished(0, "stop"), Token(1, 6), Finished(1, "length")]
    for event in events:
        buffer.put(stream, event)
    buffer.flush()
    assert await asyncio.wait_for(everything(stream), 5) == events


async def test_a_failure_ends_all_answers() -> None:
    stream = EventQueue(3, lambda index: None)
    stream.deliver(Failed("no"))
    assert await asyncio.wait_for(everything(stream), 5) == [Failed("no")]


async def read_to_the_end(stream: EventQueue) -> None:
    stream.deliver(Finished(0, "stop"))
    await everything(stream)


async def read_a_failure(stream: EventQueue) -> None:
    stream.deliver(Failed("no"))
    await everything(stream)


async def cancel(stream: EventQueue) -> None:
    stream.cancel()


@pytest.mark.parametrize("end", [read_to_the_end, read_a_failure, cancel])
async def test_a_stream_that_is_over_does_not_hold_its_request(end):
    asked: list[int | None] = []

    def stop(index: int | None) -> None:
        asked.append(index)

    held = weakref.ref(stop)
    stream = EventQueue(1, stop)
    del stop
    stream.stop(0)
    assert asked == [0]
    await end(stream)
    assert held() is None
    stream.stop(0)  # too late, and harmless


async def test_events_of_another_thread_arrive_in_order() -> None:
    stream = EventQueue(1, lambda index: None)
    buffer = EventBuffer(asyncio.get_running_loop())

    def owner() -> None:
        for i in range(200):
            buffer.put(stream, Token(0, i))
            if i % 7 == 0:
                buffer.flush()
        buffer.put(stream, Finished(0, "length"))
        buffer.flush()

    thread = threading.Thread(target=owner)
    thread.start()
    events = await asyncio.wait_for(everything(stream), 5)
    thread.join()
    assert [x.id for x in events if isinstance(x, Token)] == list(range(200))


async def test_stopping_reaches_the_owner() -> None:
    stopped: list[int | None] = []
    stream = EventQueue(2, stopped.append)
    stream.stop(1)
    stream.cancel()
    assert stopped == [1, None]
