"""Loans never add up to more than there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.models.budget import NOTHING, Budget, loans, total

BUDGETS = st.builds(Budget, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
SHARES = st.dictionaries(st.text(max_size=3), st.integers(1, 1000), max_size=5)


@given(BUDGETS, st.lists(BUDGETS, max_size=4), SHARES)
def test_loans_and_guarantees_fit_together(machine, guaranteed, shares):
    found = loans(machine, guaranteed, shares)
    assert set(found) == set(shares)
    lent, taken = total(found.values()), total(guaranteed)
    assert lent.hot <= max(0, machine.hot - taken.hot)
    assert lent.ram <= max(0, machine.ram - taken.ram)


def test_free_memory_is_lent_by_share():
    found = loans(Budget(100, 50), [Budget(30, 20), Budget(10, 0)], {"a": 1, "b": 2})
    assert found == {"a": Budget(20, 10), "b": Budget(40, 20)}
    assert loans(Budget(10, 10), [Budget(10, 20)], {"a": 1}) == {"a": NOTHING}
    assert loans(Budget(10, 10), [], {}) == {}


def test_budgets_compare_by_each_kind_of_memory():
    assert Budget(1, 2).fits(Budget(1, 3))
    assert not Budget(2, 0).fits(Budget(1, 3))
    assert Budget(2, 0).within(Budget(1, 3)) == Budget(1, 0)
    assert total([]) == NOTHING
