from __future__ import annotations

import pytest

from launch.errors import LaunchError, UsageError
from launch.machine.folders import default_cache_dir, default_data_dir, folders
from launch.model import Model, find_model


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "my-model" / "model.safetensors").write_bytes(b"")
    return tmp_path / "my-model"


def test_a_folder_is_called_by_its_name(folder, tmp_path):
    model = find_model(f"{folder}/", tmp_path)
    assert (model.path, model.name, model.folder) == (str(folder), "my-model", folder)
    assert model.config() == {"model_type": "llama"}


def test_a_folder_without_a_model_says_what_is_missing(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    model = find_model(str(folder), tmp_path)
    assert model.config() == {"model_type": "llama"}  # enough to plan
    with pytest.raises(UsageError, match=r"holds no weights \(\*\.safetensors\)"):
        model.require_weights()
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"holds no config\.json; --model wants"):
        find_model(str(folder), tmp_path)


def test_of_a_hub_id_the_engine_fetches_the_weights(folder):
    (folder / "model.safetensors").unlink()
    Model("organisation/name", "name", folder).require_weights()
    Model("organisation/name", "name", None).require_weights()


@pytest.mark.parametrize("content", ["{", "[]", '"text"'])
def test_a_config_that_is_none(folder, tmp_path, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(LaunchError, match=r"config\.json"):
        find_model(str(folder), tmp_path).config()


def test_a_hub_id_is_passed_on(tmp_path):
    model = find_model("no-such-organisation-1/no-such-model", tmp_path)
    assert model.path == "no-such-organisation-1/no-such-model"
    assert model.name == "no-such-model"
    with pytest.raises(LaunchError, match="not on this machine yet"):
        model.config()


@pytest.mark.parametrize("given", ["nope", "./not/here", "/not/here", "a/b/c", "../x", "a b/c"])
def test_a_name_that_is_neither_is_refused(tmp_path, given, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is no model"):
        find_model(given, tmp_path)


def test_folders_follow_the_system():
    assert str(default_cache_dir({"HOME": "/h"}, "linux")) == "/h/.cache/thermocline"
    assert str(default_cache_dir({"HOME": "/h"}, "darwin")) == "/h/Library/Caches/thermocline"
    assert str(default_cache_dir({"XDG_CACHE_HOME": "/c"}, "linux")) == "/c/thermocline"
    relative = {"HOME": "/h", "XDG_DATA_HOME": "c"}
    assert str(default_data_dir(relative, "linux")) == "/h/.local/share/thermocline"
    chosen = {"HOME": "/h", "THERMOCLINE_DATA_DIR": "/d", "THERMOCLINE_CACHE_DIR": "/c"}
    assert [str(x) for x in folders("", "", chosen)] == ["/d", "/c"]
    assert [str(x) for x in folders("/x", "/y", chosen)] == ["/x", "/y"]
