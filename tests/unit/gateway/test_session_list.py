"""The list of a tenant's sessions: in pages, since all other requests wait while one is made."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from gateway.app import create_app
from gateway.models import MANY_ROWS, ServedModel
from gateway.sessions import MAX_ROWS
from scheduler.sessions import SessionManager
from tests.unit.gateway.in_process import App


def used(app: App, sessions: SessionManager, *ids: str) -> None:
    """Let a turn of each session pass."""
    tenant = app.gateway.tenants.authenticate(None)
    for id in ids:
        session = sessions.table.begin(tenant.session(id))
        session.known = True
        sessions.table.end(session)


async def pages(app: App, limit: int = MAX_ROWS) -> list[list[dict[str, Any]]]:
    found, path = [], f"/v1/sessions?limit={limit}"
    after = ""
    while True:
        listed = (await app.get(path + after)).json
        found.append(listed["data"])
        if "next" not in listed:
            return found
        after = f"&after={quote(listed['next'], safe='')}"


async def test_a_list_has_so_many_rows_and_says_where_it_goes_on(app: App):
    ids = [f"s{i}" for i in range(2 * MAX_ROWS + 5)]
    used(app, app.sessions, *ids)
    found = await pages(app)
    assert [len(x) for x in found] == [MAX_ROWS, MAX_ROWS, 5]
    assert [x["id"] for page in found for x in page] == ids[::-1]
    assert len((await app.get("/v1/sessions")).json["data"]) == MAX_ROWS


async def test_sessions_used_or_forgotten_between_two_pages_end_no_walk(app: App):
    used(app, app.sessions, "a", "b/c", "d", "e")
    first = (await app.get("/v1/sessions?limit=2")).json
    assert [x["id"] for x in first["data"]] == ["e", "d"]
    await app.call("DELETE", "/v1/sessions/d", b"", {})
    used(app, app.sessions, "e")
    second = (await app.get(f"/v1/sessions?limit=1&after={quote(first['next'])}")).json
    assert [x["id"] for x in second["data"]] == ["b/c"]
    third = (await app.get(f"/v1/sessions?limit=1&after={quote(second['next'])}")).json
    assert [x["id"] for x in third["data"]] == ["a"] and "next" not in third


async def test_of_several_models_the_pages_go_on_from_one_to_the_next(app: App):
    other = SessionManager(app.engine, app.sessions._config, salt_of=app.gateway.tenants.salt_of)
    config, gateway = app.gateway.config, app.gateway
    models = [
        ServedModel(app.engine, x, config, gateway.metrics, given_name=name)
        for name, x in (("one", app.sessions), ("two", other))
    ]
    app.app = create_app(config, models, gateway.tenants, gateway.metrics)
    used(app, app.sessions, "a", "b", "c")
    used(app, other, "b", "d")
    for limit in (1, 2, 3, 5):
        rows = [(x["model"], x["id"]) for page in await pages(app, limit) for x in page]
        assert rows == [("one", "c"), ("one", "b"), ("one", "a"), ("two", "d"), ("two", "b")]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=²", "after=x"])
async def test_bad_pages(query):
    reply = await App().get(f"/v1/sessions?{quote(query, safe='=')}")
    assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])


@pytest.mark.parametrize(
    "after", ["9/1.0/x", "0/nan/x", "-1/1/x", "0/1..2/x", "0/1.0/", "1/1e9999/x"]
)
async def test_a_place_that_is_none_is_no_failure_of_ours(app: App, after):
    used(app, app.sessions, "a")
    assert (await app.get(f"/v1/sessions?after={quote(after, safe='')}")).status in (200, 400)


async def test_a_table_of_many_is_not_counted_for_each_reader_of_figures(app: App):
    for number in (2, 3):
        used(app, app.sessions, *(f"s{i}" for i in range(number)))
        assert sum((await app.model.gauges()).sessions.values()) == number
    used(app, app.sessions, *(f"s{i}" for i in range(MANY_ROWS + 1)))
    first = (await app.model.gauges()).sessions
    assert (await app.model.gauges()).sessions is first
    app.model._counted_at = float("-inf")  # some seconds later
    assert sum((await app.model.gauges()).sessions.values()) == MANY_ROWS + 1
