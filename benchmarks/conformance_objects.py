"""A pytest plug-in for ``conformance``: puts the objects that a client's tests name into our store.

It runs in the environment of those tests, so it needs nothing that is not Python's own. The tests
delete what they find; each of them gets all of it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.stored.shelf import Entry, Item, Limits
from gateway.stored.sqlite_shelf import SqliteShelf

TENANT = "local"  # the gateway's, without API keys
LIMITS = Limits(tenant_bytes=1 << 26, max_age_s=86400.0)
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


def _encoded(body: object) -> bytes:
    return json.dumps(body).encode()


@pytest.fixture(scope="session")
def shelf() -> Iterator[SqliteShelf]:
    opened = SqliteShelf(Path(os.environ["CONFORMANCE_DATABASE"]), LIMITS)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def objects(shelf: SqliteShelf) -> None:
    items = [Item("msg_abc", _encoded(SAID))]
    for id in RESPONSE_IDS:
        body = _encoded({**RESPONSE, "id": id})
        shelf.put(TENANT, Entry("response", id, id, body), items)
    conversation = Entry("conversation", "conv_123", "conv_123", _encoded(CONVERSATION))
    shelf.put(TENANT, conversation, items)
    # Their type of a stored message knows answers only.
    message = {"id": "completion_id-0", "role": "assistant", "content": "yes", "refusal": None}
    asked = [Item("completion_id-0", _encoded(message))]
    completion = Entry("completion", "completion_id", "completion_id", _encoded(COMPLETION))
    shelf.put(TENANT, completion, asked)
