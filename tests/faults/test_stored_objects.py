"""Stored objects on a full disk, and in a process that is killed while it stores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.stored.table import StoredLimits
from tests.stored_objects import (
    fill,
    mounted,
    objects_in,
    read_all,
    rows_of,
    stored_in,
)
from tests.unit.gateway.in_process import (
    MODEL,
    App,
    RecordingEngine,
    Reply,
    chat_answer,
    streamed,
)

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=32m") as place:
        yield place


@pytest.fixture
async def app(disk: Path) -> AsyncIterator[App]:
    stored = stored_in(disk / "stored.sqlite", 1 << 28)
    yield App(RecordingEngine(chat_answer()), stored=stored)
    await stored.close()


async def respond(app: App, nbytes: int, **fields: Any) -> Reply:
    asked = [{"role": "user", "content": "x" * nbytes}]
    return await app.post("/v1/responses", {"model": MODEL, "input": asked, **fields})


async def test_a_full_disk_takes_every_deletion(app: App, disk: Path) -> None:
    """Small ones and large ones; the room that is kept for them is kept again afterwards."""
    ids = [(await respond(app, n)).json["id"] for n in (1000, 4 * MIB, 1000, 2 * MIB, 1000)]
    conversation = (await app.post("/v1/conversations", {})).json["id"]
    path = f"/v1/conversations/{conversation}/items"
    for _ in range(3):
        many = [{"role": "user", "content": "x" * 5000} for _ in range(200)]
        assert (await app.post(path, {"items": many})).status == 200
    filler = fill(disk)
    assert (await respond(app, 4 * MIB)).json["store"] is False
    assert (await app.get(f"/v1/responses/{ids[1]}")).status == 200
    for id in ids:
        deleted = await app.call("DELETE", f"/v1/responses/{id}", b"", {})
        assert (deleted.status, deleted.json["deleted"]) == (200, True)
        assert (await app.get(f"/v1/responses/{id}")).status == 404
    assert (await app.call("DELETE", f"/v1/conversations/{conversation}", b"", {})).status == 200
    assert (await app.get(f"/v1/conversations/{conversation}")).status == 404
    assert rows_of(disk / "stored.sqlite", "SELECT count(*) FROM pages") == [(0,)]
    filler.unlink()
    again = await respond(app, MIB)
    assert again.json["store"] is True and "x-thermocline-stored" not in again.headers
    assert (await app.call("DELETE", f"/v1/responses/{again.json['id']}", b"", {})).status == 200
    assert (disk / "stored.sqlite.reserve").stat().st_size >= MIB


async def test_forgetting_a_session_works_there_too(app: App, disk: Path) -> None:
    made = await respond(app, MIB)
    fill(disk)
    session = made.headers["x-thermocline-session"]
    assert (await app.call("DELETE", f"/v1/sessions/{session}", b"", {})).status == 200
    assert (await app.get(f"/v1/responses/{made.json['id']}")).status == 404


async def test_an_answer_says_that_it_was_not_stored(app: App, disk: Path) -> None:
    conversation = (await app.post("/v1/conversations", {})).json["id"]
    first = await respond(app, 10)
    assert first.json["store"] is True and "x-thermocline-stored" not in first.headers
    fill(disk)
    lost = await respond(app, MIB)
    assert lost.status == 200 and lost.json["output"][0]["content"][0]["text"] == "yo"
    assert lost.json["store"] is False
    assert lost.headers["x-thermocline-stored"] == "no; reason=full"
    assert (await app.get(f"/v1/responses/{lost.json['id']}")).status == 404
    unsaved = await respond(app, MIB, conversation=conversation, store=False)
    assert unsaved.headers["x-thermocline-stored"] == "no; reason=full"
    messages = [{"role": "user", "content": "x" * MIB}]
    chat = await app.chat(messages=messages, store=True)
    assert (chat.status, chat.headers["x-thermocline-stored"]) == (200, "no; reason=full")
    items = {"items": [{"role": "user", "content": "x" * MIB}]}
    for path in ("/v1/conversations", f"/v1/conversations/{conversation}/items"):
        refused = await app.post(path, items)
        assert (refused.status, refused.error["code"]) == (507, "store_full")
    app.engine.answer = streamed()
    text = (await respond(app, MIB, stream=True)).body.decode()
    events = [json.loads(x.partition("data: ")[2]) for x in text.split("\n\n")[:-1]]
    assert [x["sequence_number"] for x in events] == list(range(len(events)))
    assert [x["response"]["store"] for x in events if "response" in x] == [True, True, False]
    assert text.count("event: response.completed") == 1


async def test_what_is_there_is_read_on_a_full_disk_after_a_restart(app: App, disk: Path) -> None:
    made = (await respond(app, 1000)).json
    await app.gateway.stored.close()
    fill(disk)
    again = stored_in(disk / "stored.sqlite", 1 << 28)
    other = App(RecordingEngine(), stored=again)
    assert (await other.get(f"/v1/responses/{made['id']}")).json == made
    assert (await other.call("DELETE", f"/v1/responses/{made['id']}", b"", {})).status == 200
    await again.close()


KILLED = """
import sys
from pathlib import Path
from gateway.stored.table import StoredLimits
from tests.stored_objects import done, entry, items, objects_in, put

objects = objects_in(Path(sys.argv[1]), StoredLimits(1 << 28, 1e6))
put(objects, entry("kept"), items("first"))
number = 0
while True:
    many = items(*(f"{number}-{i}" for i in range(50)), text="x" * 2000)
    put(objects, entry(str(number)), many)
    print(number, flush=True)
    done(objects.append("conversation", "kept", items(f"item-{number}")))
    if number % 3 == 2:
        done(objects.delete("conversation", str(number - 1)))
    number += 1
"""


@pytest.mark.parametrize("life_s", [0.3, 0.5, 0.8])
def test_a_kill_leaves_whole_objects_only(tmp_path: Path, life_s: float) -> None:
    path = tmp_path / "stored.sqlite"
    reported = tmp_path / "reported"
    with reported.open("wb") as out:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=out, env=env)
        until = time.monotonic() + 60
        while not reported.stat().st_size and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(life_s)
        child.send_signal(signal.SIGKILL)
        child.wait()
    stored = [int(x) for x in reported.read_text().split()]
    assert stored
    objects = objects_in(path, StoredLimits(1 << 28, 1e6))
    for number in stored[:-1]:  # the last one may be deleted, or not
        if number % 3 != 1:
            assert len(read_all(objects, str(number)) or []) == 50
    kept = read_all(objects, "kept")
    assert kept[: len(stored)] == ["first", *(f"item-{i}" for i in stored[:-1])]
    for tenant in "ab":
        while objects.table.tidy(tenant):
            pass
    lost = "SELECT count(*) FROM pages WHERE object NOT IN (SELECT number FROM objects)"
    assert rows_of(path, lost) == [(0,)]
    objects.table.close()
