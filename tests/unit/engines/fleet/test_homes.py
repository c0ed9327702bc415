"""The home of a session is the replica that had it last, for as many sessions as are remembered."""

from __future__ import annotations

from engines.base import SessionRef
from engines.fleet.homes import Homes

ONE, OTHER = SessionRef("alice", "one", b""), SessionRef("alice", "other", b"")


def test_the_last_home_counts_and_a_deleted_session_has_none() -> None:
    homes = Homes(10)
    homes.put(ONE, "e1")
    homes.put(ONE, "e2")
    assert (homes.get(ONE), homes.get(OTHER)) == ("e2", None)
    homes.drop(ONE)
    assert homes.get(ONE) is None


def test_the_home_that_was_used_longest_ago_is_dropped_first() -> None:
    homes = Homes(1)
    homes.put(ONE, "e1")
    homes.put(OTHER, "e2")
    assert (homes.get(ONE), homes.get(OTHER)) == (None, "e2")
