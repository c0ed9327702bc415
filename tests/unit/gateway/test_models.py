"""Models that are still to be loaded, the requests that wait, and who is shown replicas."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from typing import ClassVar

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from engines.base import Engine, ReplicaState
from engines.pool.loading import Loading
from engines.pool.on_demand import OnDemand
from gateway.app import create_app
from gateway.edge.bodies import BodyShare
from gateway.edge.key_limits import ROUTE_COSTS
from gateway.edge.rates import Taken
from gateway.keys import generate_key
from gateway.models import ServedModel
from gateway.request import body as request_body
from gateway.request.callers import RequestState, enter
from scheduler.config import SchedulerConfig
from scheduler.sessions import SessionManager
from tests.unit.gateway.in_process import MODEL, WELCOME, App, RecordingEngine
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(120)

NUM_WAITING = 4
NUM_VALUES = 100_000  # 300 KB, a large body; parsed it takes twenty times as much
SLOW = "slow"


class Slow(RecordingEngine):
    gave_up = False


class TwoModels(App):
    """One model that is there, and one on demand that is loaded once ``loading`` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = Slow(welcome=msgspec.structs.replace(WELCOME, model=SLOW))
        config, salt_of = self.gateway.config, self.gateway.tenants.salt_of
        sessions = SessionManager(self.slow, SchedulerConfig(), salt_of=salt_of)
        on_demand = OnDemand(SLOW, self.slow, sessions, 60.0, 5.0, "disk")
        self.loading = Loading([on_demand], 1, 120.0)
        self.on_demand = on_demand
        models = [
            self.model,
            ServedModel(
                self.slow,
                sessions,
                config,
                self.gateway.metrics,
                given_name=SLOW,
                on_demand=on_demand,
            ),
        ]
        gateway = self.gateway
        made = create_app(config, models, gateway.tenants, gateway.metrics, None, self.loading)
        self.gateway, self.app = made.state.gateway, made

    def ask(self, number: int) -> asyncio.Task[object]:
        many = ",".join(["[]"] * NUM_VALUES)
        said = f'"model":"{SLOW}","messages":[{{"role":"user","content":"hello {number}"}}]'
        body = f'{{{said},"metadata":{{"x":"y"}},"unknown":[{many}]}}'.encode()
        return asyncio.create_task(self.post("/v1/chat/completions", body))

    async def until_waiting(self, number: int) -> None:
        await eventually(lambda: len(self.on_demand.waiting) >= number)


async def test_a_request_that_waits_for_its_model_holds_bytes_and_no_values():
    app = TwoModels()
    first = app.ask(0)  # after it, objects that are made once are there
    await app.until_waiting(1)
    tracemalloc.start()
    others = [app.ask(i) for i in range(1, NUM_WAITING)]
    await app.until_waiting(NUM_WAITING)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    num_bytes = 3 * NUM_VALUES
    assert held < 4 * num_bytes * len(others)  # parsed it is more than twenty times as much
    for task in (first, *others):
        task.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)


async def test_large_bodies_that_only_a_parser_can_read_are_parsed_one_at_a_time(monkeypatch):
    """Half a character hides the model's name from a look at the field alone."""
    app, lock, running, most = TwoModels(), threading.Lock(), 0, 0
    whole = request_body._whole

    def counted(body: bytes) -> object:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return whole(body)

    monkeypatch.setattr(request_body, "_whole", counted)
    many = ",".join(["[]"] * NUM_VALUES)
    said = f'"model":"{MODEL}","messages":[{{"role":"user","content":"\\ud800"}}]'
    body = f'{{"unknown":[{many}],{said}}}'.encode()
    replies = await asyncio.gather(*(app.post("/v1/chat/completions", body) for _ in range(4)))
    assert {x.status for x in replies} <= {200, 400} and most == 1


async def test_it_is_asked_as_it_was_sent_once_its_model_is_there():
    app = TwoModels()
    asking = [app.ask(i) for i in range(3)]
    await app.until_waiting(3)
    follow = asyncio.create_task(app.on_demand.sessions.run())
    load = asyncio.create_task(app.loading.run())
    replies = await asyncio.gather(*asking)
    assert [x.status for x in replies] == [200] * 3
    said = sorted(x.body["messages"][0]["content"] for x in app.slow.asked)
    assert said == ["hello 0", "hello 1", "hello 2"]
    assert not app.engine.asked
    for task in (follow, load):
        task.cancel()
    await asyncio.gather(follow, load, return_exceptions=True)


async def test_a_verb_waits_as_long_as_its_client_and_a_deletion_to_its_end():
    app = TwoModels()
    leaves = asyncio.Event()
    headers = {"content-type": "application/json"}
    path = f"/v1/sessions/s/prefetch?model={SLOW}"
    verb = asyncio.create_task(app.call("POST", path, b"{}", headers, leaves))
    deletion = asyncio.create_task(app.call("DELETE", "/v1/sessions/s", b"", {}, leaves))
    await app.until_waiting(2)
    leaves.set()
    await verb
    assert len(app.on_demand.waiting) == 1 and not deletion.done()
    deletion.cancel()
    await asyncio.gather(deletion, return_exceptions=True)


@pytest.mark.parametrize("num_steps", range(6))
async def test_who_is_cancelled_in_the_moment_of_loading_holds_no_model(num_steps):
    app = TwoModels()
    tenant = app.gateway.tenants.authenticate(None)
    scope = {"type": "http", "method": "POST", "headers": []}
    share = app.gateway.limits.enter(tenant, ROUTE_COSTS["messages"], Taken())
    assert share is not None
    body = BodyShare(app.gateway.bodies)
    scope["state"] = {"request": RequestState("r", {}, body, caller=tenant, place=share)}

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    (slow,) = (x for x in app.gateway.models if x.on_demand)
    entering = asyncio.create_task(enter(app.gateway, slow, Request(scope, receive)))
    await app.until_waiting(1)
    app.loading._grant(app.on_demand)
    for _ in range(num_steps):  # through each step of the tasks that wake up now
        await asyncio.sleep(0)
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    share.leave()
    assert app.on_demand.num_uses == 0


# ---- who is shown replicas: they have addresses, and reasons why they are away

REPLICA = ReplicaState(
    name="http://10.0.0.7:8000", ready=False, trouble="it does not answer", num_running=3
)


class Replicas(RecordingEngine):
    replicas = (REPLICA,)
    members: ClassVar[dict[str, Engine]] = {}  # none takes requests now


async def test_admins_are_shown_the_replicas_of_a_model_and_others_none_of_it():
    (user, line), (root, admin_line) = generate_key("alice"), generate_key("root")
    app = App(Replicas(), api_keys=(line,), admin_keys=(admin_line,))
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        shown = await app.get(path, authorization=f"Bearer {root}")
        hidden = await app.get(path, authorization=f"Bearer {user}")
        assert (shown.status, hidden.status) == (200, 200)
        assert REPLICA.name in shown.body.decode()
        assert "10.0.0.7" not in hidden.body.decode()
    assert REPLICA.name in (await App(Replicas()).get("/v1/models")).body.decode()  # one user's own
