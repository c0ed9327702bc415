"""A caller learns nothing from how long a refusal takes: the computation is the same.

No clock is looked at. The tests compare each line of ours that runs and each function that it
calls, those of C included. The event loop's work on its timers is left out.
"""

from __future__ import annotations

import hmac
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engines.openai.requests import InvalidRequest
from gateway.keys import Tenants, generate_key
from gateway.stored.rows import Kind
from gateway.stored.table import StoredLimits
from tests.stored_objects import anew, done, entry, items, objects_in, put
from tests.unit.gateway.in_process import MODEL, App

ROOT = Path(__file__).parents[3]
OURS = tuple(f"{ROOT / name}/" for name in ("gateway", "scheduler", "engines"))
SECRET = b"sixteen bytes or more"
Work = list[tuple[str, str, object]]


@contextmanager
def noted() -> Iterator[Work]:
    """Note each line of the product in this thread, and the functions that it calls."""
    work: Work = []

    def line(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        work.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        return line

    def call(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and frame.f_code.co_filename.startswith(OURS):
            work.append((frame.f_code.co_filename, frame.f_code.co_name, _name(called)))

    before = sys.gettrace()  # a debugger's, or that of a measurement of coverage
    sys.settrace(line)
    sys.setprofile(call)
    try:
        yield work
    finally:
        sys.setprofile(None)
        sys.settrace(before)


def _name(called: object) -> object:
    return called if called is hmac.compare_digest else getattr(called, "__qualname__", "")


# ---- keys


def changed(key: str, at: int) -> str:
    return key[:at] + ("A" if key[at] != "A" else "B") + key[at + 1 :]


def refused(tenants: Tenants, key: str) -> Work:
    with noted() as work, suppress(InvalidRequest):
        tenants.authenticate(f"Bearer {key}")
        raise AssertionError(f"{key} was taken")
    return work


@pytest.mark.parametrize("admins", [0, 2])
def test_a_key_is_compared_by_its_hash_with_all_of_them_however_much_of_it_is_right(admins: int):
    made = [generate_key(f"tenant-{i}") for i in range(5)]
    lines = [line for _, line in made]
    tenants = Tenants(SECRET, lines, [generate_key("admin")[1] for _ in range(admins)])
    key = made[2][0]
    tries = [changed(key, at) for at in (3, 4, len(key) // 2, len(key) - 1)]
    tries += ["x", key[:-1], key + "A", "tc-" + "A" * (len(key) - 3)]
    first, *others = [refused(tenants, x) for x in tries]
    assert [x for _, _, x in first].count(hmac.compare_digest) == 5 + admins
    assert all(x == first for x in others)


def test_whose_key_is_right_is_compared_with_all_of_them_as_well():
    made = [generate_key(f"tenant-{i}") for i in range(5)]
    tenants = Tenants(SECRET, [line for _, line in made])
    for i, (key, _) in enumerate(made):
        with noted() as work:
            found = tenants.authenticate(f"Bearer {key}")
        assert found.name == f"tenant-{i}"
        assert [x for _, _, x in work].count(hmac.compare_digest) == 5


# ---- objects of another tenant


class Two:
    """An app that two tenants call; ``alice`` and ``bob`` are their headers."""

    def __init__(self) -> None:
        made = [generate_key(name) for name in ("alice", "bob")]
        self.app = App(api_keys=tuple(line for _, line in made))
        self.alice, self.bob = ({"authorization": f"Bearer {key}"} for key, _ in made)


VERBS = [
    ("GET", ""),
    ("DELETE", ""),
    ("POST", "/demote"),
    ("POST", "/prefetch"),
    ("POST", "/pin"),
    ("POST", "/unpin"),
]


@pytest.mark.parametrize(("method", "verb"), VERBS)
async def test_a_foreign_session_takes_the_same_steps_as_none_at_all(method: str, verb: str):
    two = Two()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    headers = {**two.alice, "x-session-id": "secret-plan"}
    assert (await two.app.post("/v1/chat/completions", body, **headers)).status == 200

    async def steps(name: str) -> Work:
        with noted() as work:
            reply = await two.app.call(method, f"/v1/sessions/{name}{verb}", b"", two.bob)
        assert reply.status == 404
        return work

    await steps("absent-plan")  # imports, and objects that are made at a first use
    absent, foreign = await steps("absent-plan"), await steps("secret-plan")
    assert foreign == absent and len(foreign) > 100
    assert (await two.app.get("/v1/sessions/secret-plan", **two.alice)).status == 200


@pytest.mark.parametrize("kind", ["response", "conversation", "completion"])
def test_a_foreign_stored_object_takes_the_same_steps_as_none_at_all(tmp_path: Path, kind: Kind):
    objects = objects_in(tmp_path / "stored.sqlite", StoredLimits(1 << 20, 1e6))
    alices, bobs = (anew(objects, x) for x in ("alice", "bob"))
    put(alices, entry("secret-one", kind=kind), items("secret-item"))

    def steps(id: str, item: str) -> Work:
        with noted() as work:
            found = (
                done(bobs.show(kind, id)),
                done(bobs.find_item(item)),
                done(bobs.delete(kind, id)),
            )
        assert found == (None, None, False)
        return work

    steps("absent-one", "absent-item")
    assert steps("secret-one", "secret-item") == steps("absent-one", "absent-item")
    assert done(alices.show(kind, "secret-one")) is not None
    objects.table.close()
