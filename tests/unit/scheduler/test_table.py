"""Rows are found by name and by how long they are quiet, and they are never too many."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import CacheOutcome, EngineRefused, SessionRef
from scheduler.session import Event, Observer, State, TurnHints
from scheduler.table import Queue, SessionTable
from tests.clock import Clock

from .conftest import Held


@pytest.mark.parametrize("sleeps", [True, False])
async def test_the_table_is_bounded_and_drops_the_longest_idle_row(
    manager_with, clock, ref, talk, sleeps
):
    """With hibernation off no session is ever cold, and an engine may report none of them."""
    manager = manager_with(max_sessions=3)
    for i in range(5):
        if sleeps:
            await talk(manager, ref(f"s{i}"))
            await manager.demote(ref(f"s{i}"))
        else:
            async with manager.turn(ref(f"s{i}")) as turn:
                turn.engine_answered(CacheOutcome("miss", 0, "disabled"))
        clock.now += 1
    assert [x.id for x in manager.list("alice")] == ["s4", "s3", "s2"]


async def test_refused_turns_leave_no_rows(manager, ref, log):
    for i in range(5):
        with suppress(EngineRefused):
            async with manager.turn(ref(f"s{i}")):
                raise EngineRefused("status 400")
    assert len(manager.table) == 0
    assert log.departures == []


async def test_running_turns_keep_their_rows(manager_with, clock, ref):
    manager = manager_with(max_sessions=1)
    async with manager.turn(ref("a")) as first, manager.turn(ref("b")) as second:
        first.engine_answered(CacheOutcome("miss", 0))
        second.engine_answered(CacheOutcome("miss", 0))
        assert len(manager.table) == 2
    async with manager.turn(ref("c")):
        assert len(manager.table) == 2  # one of those made room


def make_table(max_rows: int = 100) -> tuple[SessionTable, Clock]:
    clock = Clock()
    return SessionTable(max_rows, clock, Observer()), clock


def named(id: str) -> SessionRef:
    return SessionRef(tenant="t", id=id, salt=b"")


def ids(table: SessionTable, queue: Queue) -> list[str]:
    return [x.ref.id for x in table.queue(queue)]


@pytest.mark.parametrize(
    ("state", "held", "queue"),
    [
        (State.IDLE, Held(), Queue.HOT),
        (State.IDLE, Held(pinned=True), Queue.PINNED),
        (State.COLD, Held(hot=False), Queue.PACKED),
        (State.COLD, Held(hot=False, tier="disk"), Queue.STORED),
        (State.COLD, Held(hot=False, tier="redis"), Queue.STORED),
        (State.COLD, Held(hot=False, pinned=True), Queue.PINNED),
        (State.ACTIVE, Held(), None),
    ],
)
def test_where_a_row_stands(state, held, queue):
    table, _ = make_table()
    session = table.add(named("s"), state, 0.0)
    table.learn(session, held.report("t", "s"))
    assert [x for x in Queue if ids(table, x)] == ([queue] if queue else [])


def test_a_row_that_came_back_to_its_queue_has_its_old_place():
    """A job that was refused: the session is as long quiet as before."""
    table, _ = make_table()
    rows = [table.add(named(f"s{i}"), State.IDLE, float(i)) for i in range(3)]
    rows[1].apply(Event.HIBERNATE)
    assert ids(table, Queue.HOT) == ["s0", "s2"]
    rows[1].apply(Event.KEPT)
    assert ids(table, Queue.HOT) == ["s0", "s1", "s2"]


def test_room_is_made_by_those_who_lose_least():
    table, _ = make_table(max_rows=4)
    for tier, pinned in (("disk", True), (None, False), ("ram", False), ("disk", False)):
        state = State.COLD if tier else State.IDLE
        session = table.add(named(f"{tier}{pinned}"), state, 0.0)
        table.learn(session, Held(hot=not tier, tier=tier, pinned=pinned).report("t", "x"))
    left = []
    for i in range(4):
        before = {x.ref.id for x in table}
        table.begin(named(f"new{i}"))
        left += before - {x.ref.id for x in table}
    assert left == ["diskFalse", "ramFalse", "NoneFalse", "diskTrue"]


def test_a_row_that_made_room_is_in_no_queue_after_any_event():
    table, _ = make_table(max_rows=1)
    dropped = table.add(named("old"), State.IDLE, 0.0)
    table.add(named("new"), State.IDLE, 1.0)
    dropped.apply(Event.HIBERNATE)
    dropped.apply(Event.KEPT)
    assert ids(table, Queue.HOT) == ["new"]
    dropped.apply(Event.LOST)
    assert len(table) == 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "hot", "ram", "disk", "nothing", "pin", "expire"]),
        st.integers(0, 5),
    ),
    max_size=80,
)


@given(STEPS)
def test_every_quiet_row_stands_in_one_queue_in_order(steps):
    table, clock = make_table(max_rows=4)
    for step, number in steps:
        clock.now += number
        session = table.row("t", f"s{number}")
        if step == "begin":
            table.begin(named(f"s{number}")).known = True
        elif session is None:
            continue
        elif step == "end" and session.num_turns:
            table.end(session)
        elif step == "expire" and session.can(Event.EXPIRE):
            session.apply(Event.EXPIRE)
        elif step in ("hot", "ram", "disk", "pin"):
            tier = step if step in ("ram", "disk") else None
            held = Held(hot=tier is None, tier=tier, pinned=step == "pin")
            table.take(session, held.report("t", session.ref.id))
        elif step == "nothing":
            table.take(session, None)
    filed = [x for queue in Queue for x in table.queue(queue)]
    quiet = [x for x in table if not x.num_turns and x.state is not State.HIBERNATING]
    assert sorted(x.number for x in filed) == sorted(x.number for x in quiet)
    for queue in Queue:
        times = [x.last_used for x in table.queue(queue)]
        assert times == sorted(times)
    assert len(table) == len(list(table)) <= 4 + sum(1 for x in table if x.num_turns)


def test_a_parent_knows_how_many_of_its_children_are_served() -> None:
    table, clock = make_table()
    parent = table.begin(SessionRef("t", "p", b""))
    parent.known = True
    table.end(parent)
    hints = TurnHints(parent="p", is_child=True, retain_s=60.0)
    one = table.begin(SessionRef("t", "c1", b""), hints)
    again = table.begin(SessionRef("t", "c1", b""), hints)
    two = table.begin(SessionRef("t", "c2", b""), hints)
    assert one is again
    one.known = True
    assert (parent.num_children, one.parent, one.is_child) == (2, "p", True)
    assert one.retain_until == clock.now + 60
    table.end(one)
    assert parent.num_children == 2
    table.end(one)
    table.end(two)
    assert parent.num_children == 0
    clock.now += 10
    one = table.begin(SessionRef("t", "c1", b""))  # a turn that wishes nothing ends no wish
    assert one.parent == "p"


def test_a_parent_whose_row_comes_later_counts_its_children_as_well() -> None:
    table, _ = make_table()
    child = table.begin(SessionRef("t", "c", b""), TurnHints(parent="p"))
    parent = table.begin(SessionRef("t", "p", b""))
    other = table.begin(SessionRef("u", "p", b""))
    assert (parent.num_children, other.num_children) == (1, 0)
    table.end(child)
    assert parent.num_children == 0
