from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from launch.errors import LaunchError
from launch.sample.manifest import verify
from launch.sample.sample_model import find_gguf, folder_in, sample_model
from tests.unit.launch.sample.tiny_gguf import install_package


@pytest.fixture
def sample(tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    return install_package(site)


def make(tmp_path, sample, said=None):
    said = [] if said is None else said
    return sample_model(tmp_path / "cache", said.append, sample)


def test_it_is_converted_once(tmp_path, sample):
    said: list[str] = []
    folder = make(tmp_path, sample, said)
    assert folder == folder_in(tmp_path / "cache", sample)
    assert [text.partition(" ")[0] for text in said] == ["Converting"]
    before = (folder / "model.safetensors").stat()
    assert make(tmp_path, sample, said) == folder
    assert len(said) == 1
    assert (folder / "model.safetensors").stat().st_ino == before.st_ino
    assert [x.name for x in folder.parent.iterdir() if x.name not in (folder.name, ".lock")] == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "manifest.json"])
def test_damage_is_repaired(tmp_path, sample, name):
    folder = make(tmp_path, sample)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1])
    said: list[str] = []
    make(tmp_path, sample, said)
    assert "is converted again" in said[0]
    assert (folder / name).read_bytes() == whole
    verify(folder, sample.source)


def test_the_draft_of_a_crash_is_removed(tmp_path, sample):
    parent = folder_in(tmp_path / "cache", sample).parent
    (parent / ".Tiny.new").mkdir(parents=True)
    (parent / ".Tiny.new" / "half").write_bytes(b"x")
    folder = make(tmp_path, sample)
    assert sorted(x.name for x in parent.iterdir()) == [".lock", folder.name]


def test_two_at_once_convert_once(tmp_path, sample):
    said: list[str] = []
    threads = [threading.Thread(target=make, args=(tmp_path, sample, said)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(text.startswith("Converting") for text in said) == 1


def test_a_missing_package_says_what_to_install(sample):
    with pytest.raises(LaunchError, match="package no-such-package is missing; install it"):
        find_gguf(replace(sample, package="no-such-package"))


def test_a_damaged_package_is_refused(tmp_path, sample):
    (tmp_path / "site" / "tiny_sample" / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(LaunchError, match="damaged or of another version"):
        make(tmp_path, sample)
    assert not folder_in(tmp_path / "cache", sample).exists()


def test_a_full_disk_is_reported_before_converting(tmp_path, sample):
    with pytest.raises(LaunchError, match="are free; make room"):
        make(tmp_path, replace(sample, needed_bytes=1 << 60))


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, sample):
    (tmp_path / "cache").write_bytes(b"a file, not a folder")
    with pytest.raises(LaunchError, match="THERMOCLINE_CACHE_DIR"):
        make(tmp_path, sample)
