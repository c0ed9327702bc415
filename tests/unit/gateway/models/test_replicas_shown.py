"""Who is shown a model's replicas: they have addresses, and reasons why they are away."""

from __future__ import annotations

from typing import ClassVar

from engines.base import Engine, ReplicaState
from gateway.keys import generate_key
from tests.unit.gateway.in_process import MODEL, App, RecordingEngine

REPLICA = ReplicaState(
    name="http://10.0.0.7:8000", ready=False, trouble="it does not answer", num_running=3
)


class Fleet(RecordingEngine):
    replicas = (REPLICA,)
    members: ClassVar[dict[str, Engine]] = {}  # none takes requests now


async def test_admins_are_shown_the_replicas_of_a_model_and_others_none_of_it():
    (user, line), (root, admin_line) = generate_key("alice"), generate_key("root")
    app = App(Fleet(), api_keys=(line,), admin_keys=(admin_line,))
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        shown = await app.get(path, authorization=f"Bearer {root}")
        hidden = await app.get(path, authorization=f"Bearer {user}")
        assert (shown.status, hidden.status) == (200, 200)
        assert REPLICA.name in shown.body.decode()
        assert "10.0.0.7" not in hidden.body.decode()
    assert REPLICA.name in (await App(Fleet()).get("/v1/models")).body.decode()  # one user's own
