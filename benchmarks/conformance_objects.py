"""A pytest plug-in for ``conformance``: puts the objects that a client's tests name into our store.

It runs in the environment of those tests, which also has the packages for sealing. The tests delete
objects, so all objects are stored again before each test.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from gateway.stored.objects import Objects, ObjectStore
from gateway.stored.rows import Item, Kind
from gateway.stored.sqlite_table import SqliteTable
from gateway.stored.table import Steps, StoredLimits

T = TypeVar("T")
TENANT = "local"  # the gateway's, without API keys
LIMITS = StoredLimits(tenant_bytes=1 << 26, max_age_s=86400.0)
TEXT = {"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}
SAID = {
    "id": "msg_abc",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [TEXT],
}
RESPONSE = {
    "object": "response",
    "created_at": 1,
    "model": "model",
    "status": "completed",
    "output": [SAID],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
COMPLETION = {
    "id": "completion_id",
    "object": "chat.completion",
    "created": 1,
    "model": "model",
    "metadata": {},
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": None,
            "message": {"role": "assistant", "content": "yes", "refusal": None},
        }
    ],
}
CONVERSATION = {"id": "conv_123", "object": "conversation", "created_at": 1, "metadata": {}}
RESPONSE_IDS = ("resp_677efb5139a88190b512bc3fef8e535d", "response_id", "resp_123")


def _item(body: dict[str, Any]) -> Item:
    return Item(body["id"], msgspec.json.encode(body))


def _done(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@pytest.fixture(scope="session")
def store() -> Iterator[Objects]:
    path = Path(os.environ["CONFORMANCE_DATABASE"])
    secret = (path.parents[1] / "secret").read_bytes()  # as ``Tenants.key_of`` uses it

    def key_of(tenant: str, purpose: bytes) -> bytes:
        return hmac.digest(secret, purpose + tenant.encode(), "sha256")

    opened = ObjectStore(SqliteTable(path, LIMITS), key_of)
    yield opened.of(TENANT)
    opened.table.close()


@pytest.fixture(autouse=True)
def objects(store: Objects) -> None:
    def put(kind: Kind, body: dict[str, Any], item: dict[str, Any]) -> None:
        _done(store.put(kind, body, body["id"], [_item(item)]))

    for id in RESPONSE_IDS:
        # The tests ask for an item by the id of the one that they add.
        said = {**SAID, "id": f"{id}-said"}
        put("response", {**RESPONSE, "id": id, "output": [said]}, SAID)
    put("conversation", CONVERSATION, SAID)
    # The client's type of a stored message covers answers only.
    message = {"id": "completion_id-0", "role": "assistant", "content": "yes", "refusal": None}
    put("completion", COMPLETION, message)
