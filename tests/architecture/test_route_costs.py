"""Every route and every verb has a cost: one without a bound is noticed here."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest
from starlette.routing import Route

from docs.generators.route_costs_page import VERBS
from engines import wire
from gateway.app import ROUTES
from gateway.edge.key_limits import ROUTE_COSTS, Work

ROOT = Path(__file__).parents[2]


def routes() -> dict[str, set[str]]:
    """The methods of each route's function, by its name."""
    found: dict[str, set[str]] = {}
    for module in ROUTES:
        for route in module.router.routes:
            assert isinstance(route, Route)
            found.setdefault(route.endpoint.__name__, set()).update(route.methods or ())
    return found


def test_every_route_has_an_account_and_no_account_is_left_over() -> None:
    assert set(routes()) == set(ROUTE_COSTS)


def test_every_verb_of_the_wire_has_an_account() -> None:
    assert {x.__struct_config__.tag for x in get_args(wire.Verb)} == set(VERBS)


def test_only_what_asks_the_engine_to_compute_takes_a_place_and_no_read_is_free() -> None:
    computing = {Work.TURN, Work.RECALL, Work.QUESTION}
    for name, cost in ROUTE_COSTS.items():
        assert cost.computes == (cost.work in computing), name
        assert bool(cost.requests) == (cost.work is not Work.FIXED), name


def test_what_may_be_sent_with_a_body_counts_it() -> None:
    for name, methods in routes().items():
        assert ROUTE_COSTS[name].body == bool(methods & {"POST", "DELETE"}), name


def test_callers_are_known_by_one_function_which_charges_them() -> None:
    """A handler that authenticates by itself would be charged nothing."""
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "gateway").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "authenticate"
    ]
    assert found == ["gateway/request/callers.py"]


@pytest.mark.parametrize("work", Work)
def test_every_kind_of_work_is_used(work: Work) -> None:
    assert any(cost.work is work for cost in ROUTE_COSTS.values())
