"""The state table in the architecture page is the table in the code."""

from __future__ import annotations

from pathlib import Path

from scheduler.session import TRANSITIONS, Event, State

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_documented_table_is_the_real_one():
    rows = [line.split() for line in PAGE.read_text().splitlines()]
    header = next(row for row in rows if row[:2] == ["TURN", "QUIET"])
    assert header == [event.name for event in Event]
    for state in State:
        expected = [TRANSITIONS[state].get(event) for event in Event]
        words = [target.value if target else "." for target in expected]
        assert [state.value, *words] in rows
