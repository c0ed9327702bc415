"""/admin/models: what is served and what lies on disk, who may change it, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.keys import generate_key
from tests.fields import fields
from tests.hub import FILES, MODEL, hub
from tests.unit.gateway.in_process import App
from tests.unit.gateway.test_models import SLOW, TwoModels
from tests.waiting import eventually

ROOT, ALICE = generate_key("root"), generate_key("alice")
CHANGING = (
    ("POST", "/admin/models/load"),
    ("POST", "/admin/models/unload"),
    ("POST", "/admin/models/download"),
    ("DELETE", "/admin/models/download"),
    ("DELETE", f"/admin/models/cached/{MODEL}"),
)


@pytest.fixture(autouse=True)
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("huggingface_hub")
    with hub(tmp_path / "hub", monkeypatch):
        yield


async def test_only_admins_see_and_change_it():
    app = App(api_keys=(ALICE[1],), admin_keys=(ROOT[1],))
    hers = {"authorization": f"Bearer {ALICE[0]}"}
    for path in ("/admin/models", "/admin/models/cached"):
        assert (await app.get(path, **hers)).error["code"] == "admin_only"
    for method, path in CHANGING:
        reply = await app.call(method, path, b"", {"content-type": "application/json", **hers})
        assert reply.error["code"] == "admin_only", path
    assert (await app.get("/admin/models", authorization=f"Bearer {ROOT[0]}")).status == 200


async def test_a_model_on_demand_is_queued_loaded_and_unloaded():
    app = TwoModels()
    tasks = [asyncio.create_task(x.run()) for x in (app.on_demand.sessions, app.loading)]

    async def row():
        return (await app.get("/admin/models")).json["data"][1]

    assert (await row())["state"] == "unloaded"
    loaded = await app.post("/admin/models/load", {"model": SLOW})
    assert (loaded.status, loaded.json["said"]) == (
        202,
        f"the model {SLOW} waits to be loaded, number 1 in line",
    )
    assert loaded.json["queued"]
    assert (await app.post("/admin/models/unload", {"model": SLOW})).status == 202
    assert not (await row())["queued"] and (await row())["state"] == "unloaded"
    await app.post("/admin/models/load", {"model": SLOW})
    await eventually(lambda: app.on_demand.state.value == "loaded")
    assert await row() == {
        "name": SLOW,
        "aliases": [],
        "state": "loaded",
        "on_demand": True,
        "said": "",
        **fields(
            "in_use=0 queued=False displaces=None weights_bytes=None held_bytes=0 num_sessions=0",
            "replicas=[]",
        ),
    }
    app.on_demand.num_uses = 2
    refused = await app.post("/admin/models/unload", {"model": SLOW})
    assert (refused.status, refused.error["code"]) == (409, "model_in_use")
    app.on_demand.num_uses = 0
    assert (await app.post("/admin/models/unload", {"model": SLOW})).status == 202
    await eventually(lambda: app.on_demand.state.value == "unloaded")
    again = await app.post("/admin/models/unload", {"model": SLOW})
    assert (again.status, again.error["code"]) == (409, "model_not_loaded")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_stays_loaded_cannot_be_unloaded_and_what_is_unknown_not_loaded():
    app = TwoModels()
    refused = await app.post("/admin/models/unload", {"model": app.model.name})
    assert (refused.status, refused.error["code"]) == (409, "always_loaded")
    assert (await app.post("/admin/models/load", {"model": "none"})).status == 404
    assert (await app.post("/admin/models/load", {"model": 1})).status == 400


async def test_a_model_is_fetched_shown_and_deleted_unless_it_is_served(tmp_path: Path):
    app = App()
    begun = await app.post("/admin/models/download", {"model": MODEL})
    assert (begun.status, begun.json["state"]) == (202, "running")
    other = await app.post("/admin/models/download", {"model": "another/one"})
    assert (other.status, other.error["code"]) == (409, "not_downloaded")
    await eventually(lambda: not app.gateway.hub.is_downloading)
    assert (await app.get("/admin/models")).json["download"]["state"] == "done"
    shown = (await app.get("/admin/models/cached")).json
    assert not shown["problem"] and shown["free_bytes"]
    (cached,) = shown["data"]
    assert cached["id"] == MODEL and cached["served_as"] == ""
    for path in (MODEL, f"{cached['folder']}/snapshots/{'a' * 40}"):
        app.model.path = path
        (cached,) = (await app.get("/admin/models/cached")).json["data"]
        assert cached["served_as"] == app.model.name
        refused = await app.call("DELETE", f"/admin/models/cached/{MODEL}", b"", {})
        assert (refused.status, refused.error["code"]) == (409, "model_in_use")
    folder = Path(cached["folder"])
    moved = folder.rename(tmp_path / "disk")
    folder.symlink_to(moved)
    for path in (moved, folder):  # served over a link, and from where it leads
        app.model.path = str(path / "snapshots" / ("a" * 40))
        (cached,) = (await app.get("/admin/models/cached")).json["data"]
        assert cached["served_as"] == app.model.name
    folder.unlink()
    moved.rename(folder)
    app.model.path = ""
    deleted = await app.call("DELETE", f"/admin/models/cached/{MODEL}", b"", {})
    assert deleted.json["freed_bytes"] >= len(FILES["model.safetensors"])
    gone = await app.call("DELETE", f"/admin/models/cached/{MODEL}", b"", {})
    assert (gone.status, gone.error["code"]) == (404, "model_not_found")


async def test_no_id_but_a_path_is_refused():
    app = App()
    for name in ("../..", "/etc/passwd", "a", ""):
        refused = await app.post("/admin/models/download", {"model": name})
        assert (refused.status, refused.error["code"]) == (409, "not_downloaded"), name
