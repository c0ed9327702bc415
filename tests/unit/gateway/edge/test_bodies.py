"""The budget of all bodies, and the weight of one."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.openai.errors import InvalidRequest
from gateway.edge.bodies import LARGE_BODY_BYTES, BodyBudget, BodyShare, check_weight
from gateway.errors import RequestRefused


def share_of(budget: BodyBudget, tenant: str) -> BodyShare:
    share = BodyShare(budget)
    share.tenant = tenant
    return share


def test_one_tenant_leaves_a_quarter_to_others() -> None:
    budget = BodyBudget(100)
    first, second = share_of(budget, "one"), share_of(budget, "one")
    first.grow(60)
    second.grow(15)
    with pytest.raises(RequestRefused):
        second.grow(16)
    share_of(budget, "other").grow(25)
    first.give_back()
    second.grow(75)


def test_shares_never_exceed_the_budget_and_come_back() -> None:
    budget = BodyBudget(100)
    one, other = share_of(budget, "one"), share_of(budget, "other")
    one.grow(60)
    one.grow(40)  # less than it has
    with pytest.raises(RequestRefused):
        other.grow(41)
    other.grow(40)
    assert budget.nbytes == 100
    one.give_back()
    one.give_back()
    assert budget.nbytes == 40
    other.give_back()
    assert budget.nbytes == 0


JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(JSON)
def test_marks_inside_texts_weigh_nothing(value: object) -> None:
    """A body is refused for its values, not for the characters of its texts."""
    text = json.dumps(value) * 3
    body = msgspec.json.encode({"a": [text * (LARGE_BODY_BYTES // max(1, len(text)) * 5), value]})
    check_weight(body)


@pytest.mark.parametrize("item", [b"{}", b"[]", b'{"":0}', b'"ab"', b"1"])
def test_a_body_that_would_take_too_much_is_refused(item: bytes) -> None:
    body = b'{"x": [' + b",".join([item] * 1_200_000) + b"]}"
    with pytest.raises(InvalidRequest, match="too many values"):
        check_weight(body)


def test_a_long_prompt_of_token_ids_is_taken() -> None:
    check_weight(json.dumps({"prompt": list(range(400_000))}).encode())
