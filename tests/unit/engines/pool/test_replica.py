"""Deletions in order, within bounds, and for how long."""

from __future__ import annotations

import time

from engines.base import SessionRef
from engines.pool.replica import MAX_OWED, MAX_OWED_OF_TENANT, ReplicaDeletions


def of(tenant: str, number: int) -> SessionRef:
    return SessionRef(tenant, f"s{number}", b"")


def test_the_oldest_make_room_first_of_the_tenant_and_then_of_all():
    deletions = ReplicaDeletions()
    deletions.add(of("first", 0))
    for number in range(MAX_OWED_OF_TENANT):
        deletions.add(of("a", number))
    assert not deletions.has_room("a") and deletions.has_room("b")
    deletions.add(of("a", 0))  # deleted again: the latest now
    deletions.make_room("a")
    assert ("a", "s0") in deletions and ("a", "s1") not in deletions
    assert deletions.has_room("a") and len(deletions) == MAX_OWED_OF_TENANT
    for number in range(MAX_OWED - len(deletions)):
        deletions.add(of(f"t{number % 4}", number))
    assert not deletions.has_room("b")
    deletions.make_room("b")
    assert ("first", "s0") not in deletions and next(iter(deletions)) == of("a", 2)


def test_those_whose_time_is_over_are_dropped():
    deletions = ReplicaDeletions()
    deletions.add(of("a", 1), 10.0)
    deletions.add(of("b", 2), 11.0)
    deletions.add(of("a", 1), 12.0)
    deletions.discard(of("a", 3))
    deletions.expire(11.0)
    assert list(deletions) == [of("a", 1)]
    deletions.expire(12.0)
    assert list(deletions) == [] and deletions.has_room("a")


def test_a_deletion_takes_no_longer_among_many():
    deletions = ReplicaDeletions()
    for number in range(MAX_OWED):
        deletions.add(of(f"t{number % 5}", number), 10.0)
    began = time.process_time()
    for number in range(1000):
        deletions.expire(5.0)
        deletions.make_room("u")
        deletions.add(of("u", number), 11.0)
    assert time.process_time() - began < 0.5  # measured: 0.002; to count all each time: 6
    assert len(deletions) == MAX_OWED
