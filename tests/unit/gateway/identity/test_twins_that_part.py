"""Twins of which one leaves, reads nothing, is late or finds the answer broken or too long."""

from __future__ import annotations

import asyncio

import pytest

from engines.asgi import ClientGone
from engines.base import EngineUnavailable
from gateway.identity.twins import (
    MAX_HELD_BYTES,
    MAX_SHARED_BYTES,
    FirstLeft,
    Twins,
)
from gateway.relay.passthrough import Deadline
from tests.unit.gateway.identity.twin_requests import (
    DONE,
    SAID,
    Asking,
    Slow,
    SlowEngine,
    settle,
    until,
)
from tests.unit.gateway.in_process import App

KEY = ("t", "s", b"digest")


async def test_the_turn_goes_on_for_the_second_when_the_first_leaves() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    leaves = asyncio.Event()
    first = asking.ask(leaves)
    await until(lambda: engine.asked)
    second = asking.ask()
    await asking.joined(1)
    leaves.set()
    await settle()
    assert not engine.num_ended
    engine.head.set()
    engine.slow.say(*SAID, DONE, b"")
    assert (await second).body == b"".join(SAID) + DONE
    await first
    assert len(engine.asked) == engine.num_ended == 1


async def test_the_turn_ends_when_all_have_left() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    gone = [asyncio.Event(), asyncio.Event()]
    tasks = [asking.ask(gone[0])]
    await until(lambda: engine.asked)
    tasks.append(asking.ask(gone[1]))
    await asking.joined(1)
    for leaves in gone:
        leaves.set()
    await asyncio.gather(*tasks)
    assert engine.num_ended == 1 and app.sessions.num_running == 0


async def test_a_broken_answer_is_broken_for_both() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    tasks = [asking.ask(), asking.ask()]
    await until(lambda: engine.asked)
    await asking.joined(1)
    engine.head.set()
    engine.slow.say(SAID[0], EngineUnavailable("it died"))
    for reply in await asyncio.gather(*tasks):
        assert reply.body.startswith(SAID[0]) and b"error" in reply.body


async def test_a_turn_that_all_have_left_is_joined_no_more() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    leaves = asyncio.Event()
    first = asking.ask(leaves)
    await until(lambda: engine.asked)
    engine.head.set()
    engine.slow.say(SAID[0])
    await until(lambda: asking.running.pieces)
    engine.may_end.clear()  # the engine takes its time to let go of it
    leaves.set()
    await until(lambda: asking.running.over)
    second = asking.ask()
    await until(lambda: len(engine.asked) == 2)
    engine.may_end.set()
    engine.slow.say(*SAID, DONE, b"")
    assert (await second).body == b"".join(SAID) + DONE
    await first


async def test_a_client_that_takes_nothing_keeps_its_twin_waiting_for_nothing() -> None:
    app = App(engine := SlowEngine())
    asking = Asking(app)
    reads = asyncio.Event()
    first = asking.ask(reads=reads)
    await until(lambda: engine.asked)
    engine.head.set()
    engine.slow.say(*SAID[:2])
    await until(lambda: asking.running.pieces)
    second = asking.ask()
    engine.slow.say(SAID[2], DONE, b"")
    assert (await second).body == b"".join(SAID) + DONE
    assert not first.done()
    reads.set()
    assert (await first).body == b"".join(SAID) + DONE
    assert len(engine.asked) == 1


@pytest.mark.parametrize("closes", [False, True])
async def test_a_client_that_takes_nothing_is_cut_and_its_turn_is_counted(closes: bool) -> None:
    app = App(engine := SlowEngine(), client_stall_s=0.05)
    asking = Asking(app)
    leaves = asyncio.Event()
    first = asking.ask(leaves, reads=asyncio.Event())
    await until(lambda: engine.asked)
    second = asking.ask()
    await asking.joined(1)
    engine.head.set()
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    engine.slow.say(SAID[0])
    await until(lambda: asking.running.pieces)
    if closes:
        leaves.set()
    engine.slow.say(*SAID[1:], usage, DONE, b"")
    assert (await second).body.endswith(DONE)
    assert (await first).body == b""
    assert app.sessions.num_running == 0
    assert b'thermocline_tokens_total{kind="answered"} 3.0' in (await app.get("/metrics")).body


async def test_a_turn_ends_when_its_client_was_cut_and_then_its_twin_leaves() -> None:
    app = App(engine := SlowEngine(), client_stall_s=0.05)
    asking = Asking(app)
    leaves = asyncio.Event()
    first = asking.ask(reads=asyncio.Event())
    await until(lambda: engine.asked)
    second = asking.ask(leaves)
    await asking.joined(1)
    engine.head.set()
    engine.slow.say(*SAID)
    # All of it is taken for the first one only after that was cut.
    await until(lambda: asking.running.first.used_so_far().completion_tokens == len(SAID))
    assert app.sessions.num_running == 1
    leaves.set()
    await until(lambda: engine.num_ended)
    await asyncio.gather(first, second)
    assert app.sessions.num_running == 0


async def test_the_turn_of_a_client_that_takes_nothing_is_joined_no_more() -> None:
    app = App(engine := SlowEngine(), client_stall_s=0.05)
    asking = Asking(app)
    first = asking.ask(reads=asyncio.Event())
    await until(lambda: engine.asked)
    engine.may_end.clear()  # the engine takes its time to let go of it
    engine.head.set()
    engine.slow.say(SAID[0])
    await until(lambda: asking.running.over)
    engine.may_end.set()
    await first


async def test_a_turn_keeps_the_deadline_of_its_last_twin() -> None:
    app = App(engine := SlowEngine(), request_timeout_s=4.0)
    asking = Asking(app)
    first = asking.ask()
    await until(lambda: engine.asked)
    with asking.running.joined(asyncio.get_running_loop().time() + 60):
        await asyncio.sleep(2.1)
        engine.head.set()
        engine.slow.say(SAID[0])
        await asyncio.sleep(2.1)
        engine.slow.say(*SAID[1:], DONE, b"")
        assert (await first).body == b"".join(SAID) + DONE


async def test_a_deadline_is_kept_and_may_be_put_off_while_it_runs() -> None:
    now = asyncio.get_running_loop().time
    deadline = Deadline(now())
    deadline.put_off(now() - 1)
    with pytest.raises(TimeoutError):
        async with deadline.kept():
            await asyncio.sleep(60)
    deadline = Deadline(now())
    async with deadline.kept():
        deadline.put_off(now() + 60)
        await asyncio.sleep(0.01)
    deadline = Deadline(now())
    async with deadline.kept():
        with pytest.raises(TimeoutError):  # the inner one keeps it alone, to end it its own way
            async with deadline.kept():
                await asyncio.sleep(60)
        await asyncio.sleep(0.01)


async def test_a_twin_of_a_request_that_ended_without_an_answer_is_on_its_own() -> None:
    twins: Twins[str] = Twins()
    with pytest.raises(ClientGone), twins.serving(KEY, "first", never) as shared:
        assert twins.find(KEY) is shared
        with shared.joined(0.0) as twin:
            shared.end(ClientGone())
            with pytest.raises(FirstLeft):
                await twin.begin()
        assert twins.find(KEY) is None
        raise ClientGone
    assert twins.find(KEY) is None


async def test_pieces_held_for_twins_to_come_are_bounded() -> None:
    upstream = Slow()
    upstream.say(*[b"x" * 1000] * (MAX_HELD_BYTES // 1000 + 2), b"")
    twins: Twins[str] = Twins()
    with twins.serving(KEY, "first", never) as shared:
        async with shared.answered(upstream) as first:
            assert len(await first.read()) > MAX_HELD_BYTES
        assert len(shared.pieces) <= 1 and twins.find(KEY) is None


async def test_pieces_held_for_twins_that_read_are_bounded() -> None:
    upstream, piece = Slow(), b"x" * (1 << 20)
    upstream.say(*[piece] * 40, b"")
    with Twins[str]().serving(KEY, "first", never) as shared, shared.joined(0.0) as twin:
        async with shared.answered(upstream) as first:
            await until(lambda: shared.too_long)
            await settle()
            assert len(shared.pieces) == MAX_SHARED_BYTES // len(piece) + 1
            with pytest.raises(EngineUnavailable, match="too long"):
                await twin.read()
            assert len(await first.read()) == 40 * len(piece)
            assert len(shared.pieces) <= 1


def never(deadline: float) -> None:
    """Put nothing off."""
