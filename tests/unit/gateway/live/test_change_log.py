"""Which names changed, and when, with one entry for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.live.scope import ChangeLog

marks = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=30)


@given(marks, st.integers(0, 40))
def test_it_lists_each_name_that_changed_since_once(marks, since):
    log: ChangeLog[str] = ChangeLog()
    moment, latest = 0, {}
    for name, later in marks:
        moment += later
        log.mark(name, moment)
        latest[name] = moment
    assert sorted(log.since(since)) == sorted(x for x, at in latest.items() if at > since)


@given(marks, st.integers(0, 40))
def test_a_bounded_log_never_hides_a_change_that_it_claims_to_know(marks, since):
    log: ChangeLog[str] = ChangeLog(max_entries=3)
    moment, latest = 0, {}
    for name, later in marks:
        moment += later
        log.mark(name, moment)
        latest[name] = moment
    if log.knows(since):
        assert set(log.since(since)) == {x for x, at in latest.items() if at > since}
