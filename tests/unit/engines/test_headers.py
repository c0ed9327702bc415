"""The headers between gateway and engine: read as they were written, nothing else let through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.headers import (
    MAX_WEIGHT,
    PATIENCE_HEADER,
    SALT_HEADER,
    SESSION_HEADER,
    WEIGHT_HEADER,
    CacheOutcome,
    patience_from,
    patience_header,
    session_from,
    session_headers,
    weight_from,
    weight_header,
)
from engines.openai.errors import InvalidRequest
from kvstore.session import SessionRef


@pytest.mark.parametrize(
    ("outcome", "header"),
    [
        (CacheOutcome("miss", 0, "never-stored"), "miss; tokens=0; reason=never-stored"),
        (CacheOutcome("hot", 40), "hot; tokens=40"),
        (CacheOutcome("cold-redis", 7, "diverged"), "cold-redis; tokens=7; reason=diverged"),
    ],
)
def test_an_outcome_is_read_as_it_was_written(outcome: CacheOutcome, header: str) -> None:
    assert outcome.header() == header
    assert CacheOutcome.parse(header) == outcome


def test_an_outcome_without_a_number_is_read() -> None:
    assert CacheOutcome.parse("miss") == CacheOutcome("miss", 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "warm; tokens=1",
        "cold-None; tokens=1",
        'hot"; tokens=1',
        "hot; tokens=x",
        "hot; tokens=1\n",
    ]
    + ["hot; tokens=1; reason=UPPER", "hot; tokens=1; reason=a b"]
    + ["hot; tokens=" + "9" * 5000],
)
def test_anything_else_is_no_outcome(text: str) -> None:
    assert CacheOutcome.parse(text) is None


@given(
    st.builds(
        SessionRef,
        tenant=st.from_regex(r"[a-zA-Z0-9._-]{1,20}", fullmatch=True),
        id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        salt=st.binary(max_size=32),
    )
)
def test_a_session_is_read_as_it_was_written(session: SessionRef) -> None:
    headers = session_headers(session)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert session_from(headers) == session


def test_a_request_without_the_header_has_no_session() -> None:
    assert session_from({}) is None
    assert session_from({SESSION_HEADER: "", SALT_HEADER: "00"}) is None


def test_a_salt_that_is_not_hexadecimal_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=SALT_HEADER):
        session_from({SESSION_HEADER: "s", SALT_HEADER: "xx"})


@given(st.floats(0, 1e6))
def test_patience_is_read_as_it_was_written(seconds: float) -> None:
    assert patience_from(patience_header(seconds)) == pytest.approx(seconds, abs=1e-3)


def test_patience_that_is_over_is_none_at_all_and_other_words_are_refused() -> None:
    assert patience_from(patience_header(-5.0)) == 0.0
    assert patience_from({}) is None
    for word in ("", "-1", "nan", "inf", "1e9", "soon"):
        with pytest.raises(InvalidRequest, match=PATIENCE_HEADER):
            patience_from({PATIENCE_HEADER: word})


def test_a_weight_is_read_as_it_was_written_and_other_words_are_refused() -> None:
    assert weight_from({}) == 1
    assert [weight_from(weight_header(x)) for x in (1, 7, MAX_WEIGHT)] == [1, 7, MAX_WEIGHT]
    for word in ("", "0", "-1", "1.5", "9999999", "\u0663"):
        with pytest.raises(InvalidRequest, match=WEIGHT_HEADER):
            weight_from({WEIGHT_HEADER: word})
