"""The homes of sessions whose engines several gateways use."""

from __future__ import annotations

from engines.base import SessionRef
from engines.fleet.homes import SAID_S, LastHomes, SaidMoves, SharedHomes
from tests.clock import Clock

ONE, OTHER = SessionRef("alice", "one", b""), SessionRef("alice", "other", b"")


def mark(tenant: str, id: str) -> bytes:
    return f"{tenant} {id}".encode()


def gateway(clock: Clock, *replicas: str, most: int = 10) -> tuple[SharedHomes, SaidMoves]:
    said = SaidMoves(clock)
    return SharedHomes(most, mark, {x.encode(): x for x in replicas}, said), said


def test_a_session_that_one_gateway_moves_is_found_there_by_the_other() -> None:
    clock = Clock()
    (a, a_said), (b, b_said) = gateway(clock, "e1", "e2"), gateway(clock, "e1", "e2")
    b.put(ONE, "e1")
    a.served(ONE, "e2")
    b.hear(a_said.recent())
    assert b.get(ONE) == "e2"
    b.put(ONE, "e1")  # an older copy there is listed
    assert b.get(ONE) == "e2"
    b.served(ONE, "e1")
    a.hear(b_said.recent())
    assert (a.get(ONE), b.get(ONE)) == ("e1", "e1")
    assert a.get(OTHER) is None


def test_a_turn_at_home_is_not_said_and_a_move_for_some_time() -> None:
    clock = Clock()
    homes, said = gateway(clock, "e1", "e2")
    for _ in range(3):
        homes.served(ONE, "e1")
    assert (said.num, len(said.recent())) == (1, 1)
    clock.now += SAID_S + 1
    homes.served(ONE, "e2")
    assert (said.num, len(said.recent())) == (2, 1)


def test_engines_that_are_not_ours_mean_nothing_and_homes_are_bounded() -> None:
    clock = Clock()
    homes, _ = gateway(clock, "e1", most=2)
    _, said = other = gateway(clock, "e1", "far")
    other[0].served(ONE, "far")
    homes.hear(said.recent())
    assert homes.get(ONE) is None
    for i in range(5):
        other[0].served(SessionRef("alice", str(i), b""), "e1")
    homes.hear(said.recent())
    known = [homes.get(SessionRef("alice", str(i), b"")) for i in range(5)]
    assert known == [None, None, None, "e1", "e1"]


def test_a_deleted_session_has_no_home() -> None:
    clock = Clock()
    (a, a_said), (b, _) = gateway(clock, "e1", "e2"), gateway(clock, "e1", "e2")
    a.served(ONE, "e2")
    b.hear(a_said.recent())
    for homes in (a, b):
        homes.drop(ONE)
        assert homes.get(ONE) is None
    last = LastHomes(1)
    last.served(ONE, "e1")
    last.served(OTHER, "e2")
    assert (last.get(ONE), last.get(OTHER)) == (None, "e2")
