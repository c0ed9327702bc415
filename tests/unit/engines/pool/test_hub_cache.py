"""The hub client's cache: the real client, and a hub on this machine."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from engines.pool.hub_cache import HubCache, HubRefusal
from tests.hub import FILES, MODEL, hub
from tests.waiting import eventually

pytest.importorskip("huggingface_hub")
WANTED = len(FILES["config.json"]) + len(FILES["model.safetensors"])
WEIGHTS, OLDER = hashlib.sha1(FILES["model.safetensors"]).hexdigest(), "0" * 40  # blobs


async def ended(download):
    await eventually(lambda: download.state != "running", within_s=60)
    return download


async def test_a_model_is_downloaded_listed_and_deleted(tmp_path, monkeypatch):
    with hub(tmp_path / "hub", monkeypatch):
        cache = HubCache()
        assert (await cache.listed()).models == ()
        download = await ended(cache.begin(MODEL))
        assert (download.state, download.problem) == ("done", "")
        assert download.done_bytes == download.total_bytes == WANTED
        listed = await cache.listed()
        (model,) = listed.models
        assert model.id == MODEL and model.nbytes >= WANTED
        assert listed.free_bytes and not listed.problem
        assert not list(tmp_path.rglob("README.md"))
        assert await cache.delete(MODEL) >= WANTED
        assert (await cache.listed()).models == ()
        assert not list(tmp_path.rglob("model.safetensors"))


async def test_a_download_shows_how_far_it_is_and_can_be_stopped(tmp_path, monkeypatch):
    with hub(tmp_path / "hub", monkeypatch, wait_s=2.0):
        cache = HubCache()
        download = cache.begin(MODEL)
        with pytest.raises(HubRefusal, match=f"{MODEL} is being downloaded; one at a time"):
            cache.begin("another/model")
        await eventually(lambda: download.total_bytes > 0, within_s=60)
        assert download.done_bytes < download.total_bytes == WANTED
        with pytest.raises(HubRefusal, match="is being downloaded"):
            await cache.delete(MODEL)
        await cache.stop()
        assert download.state == "stopped" and not cache.is_downloading


@pytest.mark.parametrize("name", [OLDER, f"{WEIGHTS}.0123abcd.incomplete"])
async def test_what_is_not_wanted_does_not_count_as_downloaded(tmp_path, monkeypatch, name):
    """Neither files of an older revision nor parts that a killed download has left."""
    blobs = blobs_of(tmp_path / "hub", {name: 2 * WANTED})
    with hub(tmp_path / "hub", monkeypatch, wait_s=0.5):
        cache = HubCache()
        download = cache.begin(MODEL)
        await eventually(lambda: download.total_bytes > 0, within_s=60)
        assert download.done_bytes < download.total_bytes == WANTED
        assert (await ended(download)).state == "done"
    assert {x.name for x in blobs.iterdir()} > {name, WEIGHTS}


@pytest.mark.parametrize("name", [OLDER, WEIGHTS])
async def test_room_is_needed_for_what_is_not_here_yet(tmp_path, monkeypatch, name):
    claimed = shutil.disk_usage(tmp_path).free + (1 << 30)
    blobs_of(tmp_path / "hub", {name: claimed})
    with hub(tmp_path / "hub", monkeypatch, claimed_bytes=claimed):
        download = await ended(HubCache().begin(MODEL))
    if name == WEIGHTS:
        assert (download.state, download.problem) == ("done", "")
    else:
        assert download.state == "failed" and "GiB are free" in download.problem


def blobs_of(cache: Path, nbytes: Mapping[str, int]) -> Path:
    """Put sparse files of these sizes beside the model's; returns their folder."""
    folder = cache / f"models--{MODEL.replace('/', '--')}" / "blobs"
    folder.mkdir(parents=True)
    for name, size in nbytes.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    return folder


async def test_what_cannot_be_downloaded_says_why(tmp_path, monkeypatch):
    with hub(tmp_path / "hub", monkeypatch):
        for name in ("../../etc", "--help/x"):
            with pytest.raises(HubRefusal, match="no hub id"):
                HubCache().begin(name)
        assert "the hub shows no unknown/model" in await problem_of("unknown/model")


async def test_a_failed_download_names_a_way_out(tmp_path, monkeypatch):
    with hub(tmp_path / "file" / "hub", monkeypatch):
        (tmp_path / "file").write_bytes(b"")
        assert "start it with another HF_HOME" in await problem_of(MODEL)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    assert "cannot be reached from this machine" in await problem_of(MODEL)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "start it without" in await problem_of(MODEL)


async def problem_of(name):
    download = await ended(HubCache().begin(name))
    assert download.state == "failed"
    return download.problem


async def test_without_the_hubs_client_the_reason_is_said(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    cache = HubCache(str(bare))
    assert "huggingface_hub" in (await cache.listed()).problem
    missing = HubCache(str(tmp_path / "nothing"))
    assert "cannot be started" in (await missing.listed()).problem


async def test_what_is_here_of_an_unfinished_download_is_deleted(tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--x--y"
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots").mkdir()
    (folder / "blobs" / "z.incomplete").write_bytes(b"w" * 5000)
    with hub(tmp_path / "hub", monkeypatch):
        cache = HubCache()
        assert [x.id for x in (await cache.listed()).models] == ["x/y"]
        assert await cache.delete("x/y") == 5000
        assert (await cache.listed()).models == () and not folder.exists()


async def test_a_cache_of_many_models_is_listed(tmp_path, monkeypatch):
    names = [f"organisation/model-with-a-usual-name-{x:03}" for x in range(400)]
    for name in names:
        (tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots").mkdir(parents=True)
    with hub(tmp_path / "hub", monkeypatch):
        listed = await HubCache().listed()
    assert listed.problem == "" and sorted(x.id for x in listed.models) == names


async def test_of_a_folder_on_another_disk_the_link_is_deleted_and_nothing_freed(
    tmp_path, monkeypatch
):
    with hub(tmp_path / "hub", monkeypatch):
        cache = HubCache()
        assert (await ended(cache.begin(MODEL))).state == "done"
        (folder,) = (tmp_path / "hub").glob("models--*")
        moved = folder.rename(tmp_path / "disk")
        folder.symlink_to(moved)
        assert await cache.delete(MODEL) == 0
        assert (await cache.listed()).models == ()
        assert list(moved.rglob("model.safetensors")) and not folder.is_symlink()


async def test_a_model_that_is_not_there_is_not_deleted(tmp_path, monkeypatch):
    refused = pytest.raises(HubRefusal, match="not in the cache")
    with hub(tmp_path / "hub", monkeypatch), refused:
        await asyncio.wait_for(HubCache().delete("no/model"), 60)
