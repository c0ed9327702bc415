"""The limits of one key, by a clock that the tests move."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gateway.edge.key_limits import ROUTE_COSTS, KeyLimits, KeyShare, RouteCost
from gateway.errors import RequestRefused
from gateway.keys import BadKeyLine, Limits, Tenant, Tenants, generate_key
from gateway.models import Models, ServedModel
from gateway.request.callers import has_room_for
from scheduler.config import SchedulerConfig
from tests.unit.gateway.in_process import Answered, App, HoldingEngine, RecordingEngine
from tests.waiting import eventually

ALICE = Tenant("alice", b"salt", "a1")
OTHER_KEY = Tenant("alice", b"salt", "a2")
TURN, READ = ROUTE_COSTS["chat_completions"], ROUTE_COSTS["show_response"]


async def enter(limits: KeyLimits, tenant: Tenant = ALICE, cost: RouteCost = TURN) -> KeyShare:
    share = limits.enter(tenant, cost, await limits.count(tenant, cost))
    assert share is not None
    return share


async def refusal(
    limits: KeyLimits, tenant: Tenant = ALICE, cost: RouteCost = TURN
) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        await enter(limits, tenant, cost)
    assert (caught.value.failure.status, caught.value.failure.code) == (429, "rate_limit_exceeded")
    return caught.value


async def test_requests_per_minute():
    limits = KeyLimits(Limits(requests_per_minute=3))
    shares = [await enter(limits) for _ in range(3)]
    left = [dict(x.headers())["x-ratelimit-remaining-requests"] for x in shares]
    assert left == ["2", "1", "0"]
    failure = (await refusal(limits)).failure
    assert 0 < failure.retry_after_s <= 120
    assert dict(failure.headers)["x-ratelimit-remaining-requests"] == "0"
    await enter(limits, OTHER_KEY)  # each key has its own


async def test_tokens_are_counted_after_the_answer():
    limits = KeyLimits(Limits(tokens_per_minute=600))
    share = await enter(limits)
    (await enter(limits)).used_tokens(900)  # not known before
    share.used_tokens(0)
    await asyncio.sleep(0.01)
    assert (await refusal(limits)).failure.retry_after_s > 0
    await enter(limits, cost=READ)  # what costs the engine nothing goes on


async def test_requests_at_once():
    limits = KeyLimits(Limits(concurrent_requests=2))
    one, two = await enter(limits), await enter(limits)
    await refusal(limits)
    one.leave()
    one.leave()
    three = await enter(limits)
    await refusal(limits)
    for share in (two, three):
        share.leave()
    await enter(limits)


async def test_one_that_finds_no_place_is_not_counted_in_the_minute():
    limits = KeyLimits(Limits(requests_per_minute=2, concurrent_requests=1))
    first = await enter(limits)
    await refusal(limits)
    first.leave()
    await enter(limits)


async def test_reads_cost_a_part_of_a_request_and_need_no_place():
    limits = KeyLimits(Limits(requests_per_minute=2, concurrent_requests=1))
    turn = await enter(limits)
    for _ in range(10):
        (await enter(limits, cost=READ)).leave()
    await refusal(limits, cost=READ)
    await refusal(limits)  # the reads that left gave back no place of the turn
    turn.leave()


async def test_a_path_that_is_open_to_all_is_charged_to_no_key():
    limits, cost = KeyLimits(Limits(requests_per_minute=1)), ROUTE_COSTS["livez"]
    assert limits.enter(ALICE, cost, await limits.count(ALICE, cost)) is None
    await enter(limits)


async def test_a_keys_own_line_goes_before_the_usual_limits_and_may_change():
    limits = KeyLimits(Limits(concurrent_requests=1))
    mine = ALICE._replace(limits=Limits(concurrent_requests=2))
    await enter(limits, mine)
    second = await enter(limits, mine)
    await refusal(limits, mine)
    await refusal(limits, ALICE)  # the line was taken back: those that run still count
    limits.usual = Limits(concurrent_requests=3)
    await enter(limits, ALICE)
    second.leave()


async def test_requests_that_began_under_other_limits_make_room_when_they_end():
    limits = KeyLimits(Limits())
    two = ALICE._replace(limits=Limits(concurrent_requests=2))
    before = [await enter(limits, two) for _ in "ab"]
    changed = ALICE._replace(limits=Limits(60, 600, concurrent_requests=2))
    await refusal(limits, changed)
    for share in before:
        share.leave()
    share = await enter(limits, changed)
    assert dict(share.headers())["x-ratelimit-limit-requests"] == "60"
    await enter(limits, changed)
    await refusal(limits, changed)


# ---- in the lines of the keys


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (" rpm=5", "a limit 'rpm'"),
        (" sessions=-1", "after its hash"),
        (" sessions", "after its hash"),
        (" sessions=x", "after its hash"),
        (" ram_bytes=4MiB", "whole numbers such as requests_per_minute=60 ram_bytes=67108864$"),
        ("sessions=1", "is not 'tenant:sha256'"),
    ],
)
def test_a_line_with_other_words_is_refused(words: str, reason: str):
    _, line = generate_key("alice")
    with pytest.raises(BadKeyLine, match=reason):
        Tenants(b"sixteen bytes or more", [line + words])


# ---- in answers


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1/conversations/conv_1/items"),
        ("POST", "/v1/conversations"),
        ("DELETE", "/v1/conversations/conv_1"),
        ("GET", "/v1/models"),
        ("GET", "/v1/sessions"),
        ("POST", "/v1/sessions/x/demote"),
        ("DELETE", "/v1/sessions/x"),
    ],
)
async def test_requests_that_are_no_turn_count_too(method: str, path: str):
    app = App(RecordingEngine(), requests_per_minute=1)
    body = b"{}" if method == "POST" else b""
    headers = {"content-type": "application/json"}
    statuses = [(await app.call(method, path, body, headers)).status for _ in range(11)]
    assert 429 not in statuses[:2] and statuses[-1] == 429


async def test_asking_for_the_caller_twice_charges_once():
    """The handlers of conversations look at the caller at several places."""
    app = App(RecordingEngine(), requests_per_minute=1)
    first = await app.post("/v1/conversations", {})
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await app.post("/v1/conversations", {})).status != 429


async def test_answers_say_how_much_is_left_and_refusals_when_to_come_back():
    usage = b'{"usage": {"prompt_tokens": 90, "completion_tokens": 20}}'
    engine = RecordingEngine(Answered(200, {"content-type": "application/json"}, usage))
    app = App(engine, requests_per_minute=2, tokens_per_minute=100)
    first = await app.chat()
    assert first.status == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    second = await app.chat()
    assert (second.status, second.error["code"]) == (429, "rate_limit_exceeded")
    assert "100 tokens a minute" in second.error["message"]
    assert int(second.headers["retry-after"]) > 0
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    assert len(engine.asked) == 1


async def test_a_request_that_has_ended_makes_room_however_it_ended():
    app = App(concurrent_requests=1)
    for _ in range(3):
        assert (await app.post("/v1/chat/completions", b"nonsense")).status == 400
        assert (await app.chat()).status == 200


async def test_requests_at_once_of_one_key():
    app = App(engine := HoldingEngine(), concurrent_requests=1)
    first = asyncio.create_task(app.chat())
    await asyncio.sleep(0.05)
    assert (await app.chat()).status == 429
    assert (await app.get("/v1/models")).status == 200  # costs the engine nothing
    engine.going_on.set()
    assert (await first).status == 200


async def test_sessions_that_come_together():
    """A row is there only once its turn has a slot; until then the ids count."""
    app = App(engine := HoldingEngine(), SchedulerConfig(max_running=1), sessions=1)
    names = ["a", "b", "c", "a", "d"]
    asked = [asyncio.create_task(app.chat(f"{i}", session_id=x)) for i, x in enumerate(names)]
    await eventually(lambda: not (sum(x.done() for x in asked) < 3 or not app.sessions.num_waiting))
    engine.going_on.set()
    assert [(await x).status for x in asked] == [200, 429, 429, 200, 429]
    assert app.sessions.num_sessions("local") == 1


async def test_a_session_that_came_to_nothing_leaves_its_place():
    app = App(sessions=1)
    app.sessions.stop_admitting()
    assert (await app.chat(session_id="b")).status == 503
    assert (await app.chat(session_id="c")).status == 503  # not 429
    assert not app.gateway.limits.coming(app.gateway.tenants.operator())


async def test_sessions_of_one_tenant():
    app = App(sessions=2)
    assert [(await app.chat(session_id=x)).status for x in "abca"] == [200, 200, 429, 200]


async def test_one_name_on_two_models_is_two_sessions():
    app = App(sessions=1)
    gateway, tenant = app.gateway, app.gateway.tenants.operator()
    one, two = (
        ServedModel(app.engine, app.sessions, gateway.config, gateway.metrics, given_name=x)
        for x in ("one", "two")
    )
    gateway.models = Models([one, two])
    gateway.limits._coming[tenant.name] = Counter([one.coming_key("s")])
    assert has_room_for(gateway, tenant, one, "s")
    assert not has_room_for(gateway, tenant, two, "s")
