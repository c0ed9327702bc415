"""The session table has no dead ends, and only ``apply`` moves along it."""

from __future__ import annotations

import itertools

import pytest

from engines.base import SessionRef
from scheduler.session import TRANSITIONS, Event, IllegalTransition, Session, State


def new_session(state: State = State.ACTIVE, id: str = "s", tenant: str = "t", **facts) -> Session:
    ref = SessionRef(tenant=tenant, id=id, salt=b"")
    session = Session(ref=ref, state=state, last_used=0.0, listener=lambda *_: None)
    for key, fact in facts.items():
        setattr(session, key, fact)
    return session


def reachable(start: State) -> set[State]:
    seen, todo = {start}, [start]
    while todo:
        for target in TRANSITIONS[todo.pop()].values():
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def test_every_state_has_a_row_and_every_event_a_use():
    assert set(TRANSITIONS) == set(State)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


def test_every_turn_is_legal_while_anything_is_left_and_nothing_is_a_dead_end():
    for state in set(State) - {State.GONE}:
        expected = {State.GONE} if state is State.LEAVING else {State.ACTIVE, State.GONE}
        assert expected <= reachable(state)
        assert Event.TURN in TRANSITIONS[state]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_apply_follows_the_table_or_names_event_and_state(state, event):
    session = new_session(state)
    if event in TRANSITIONS[state]:
        assert session.apply(event) is TRANSITIONS[state][event] is session.state
    else:
        with pytest.raises(IllegalTransition, match=rf"{event.value} while {state.value}"):
            session.apply(event)
        assert session.state is state


def test_an_old_job_cannot_end_a_newer_hibernation():
    session = new_session(State.IDLE)
    session.apply(Event.HIBERNATE)
    old = session.hibernation
    session.apply(Event.TURN)
    assert not session.complete(Event.EVICTED, old)
    assert session.state is State.ACTIVE
    session.apply(Event.QUIET)
    session.apply(Event.HIBERNATE)
    assert not session.complete(Event.EVICTED, old)
    assert session.state is State.HIBERNATING
    assert session.complete(Event.EVICTED, session.hibernation)
    assert session.state is State.COLD
