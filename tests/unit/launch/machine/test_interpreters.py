"""Where vLLM is found, when it is chosen, and the effect of a GPU."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from engines.about_vllm.environment import import_path
from engines.config import EngineConfig, VllmConfig
from kvstore.config import StoreConfig
from launch.cli.options import layers
from launch.errors import LaunchError
from launch.machine.gpus import Gpu, parse_gpus
from launch.machine.interpreters import FOLDER, find_python, require_vllm
from launch.settings.effective_settings import effective_settings, engine_kind


def test_the_users_interpreter_comes_before_the_installers(tmp_path):
    assert find_python("", tmp_path) == ""
    made = tmp_path / FOLDER / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.touch()
    assert find_python("", tmp_path) == str(made)
    assert find_python("/opt/vllm/bin/python", tmp_path) == "/opt/vllm/bin/python"


def test_without_vllm_the_cure_is_named():
    with pytest.raises(LaunchError, match=r"install\.sh vllm"):
        require_vllm("", StoreConfig())
    with pytest.raises(LaunchError, match="has no vLLM"):
        require_vllm(sys.executable, StoreConfig())


@pytest.mark.parametrize(
    ("store", "asked"),
    [
        (StoreConfig(redis_url="redis://there"), True),
        (StoreConfig(redis_url="redis://there", redis_bytes=0), False),
        (StoreConfig(), False),
    ],
)
def test_redis_is_needed_beside_vllm_where_it_is_used(tmp_path, store, asked):
    """A Python that has everything but redis-py."""
    lacking, whole = (
        json.dumps(
            {
                "vllm": "0.32.1",
                "cpu": True,
                "missing": missing,
                "plugin": True,
                "plugin_version": version("thermocline"),
            }
        )
        for missing in (["redis"], [])
    )
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ncase \"$2\" in *\"'redis'\"*) echo '{lacking}';; *) echo '{whole}';; esac\n"
    )
    python.chmod(0o700)
    if asked:
        with pytest.raises(LaunchError, match="lacks redis; install them beside vLLM"):
            require_vllm(str(python), store)
    else:
        assert require_vllm(str(python), store).cpu


def test_gpus_with_memory_of_their_own_and_without():
    text = "NVIDIA H200, 142000\nNVIDIA GB10, [N/A]\n\n"
    assert parse_gpus(text) == [Gpu("NVIDIA H200", 142000 << 20), Gpu("NVIDIA GB10", None)]


@pytest.mark.parametrize(
    ("engine", "gpus", "expected"),
    [
        (EngineConfig(), [], "mlx"),
        (EngineConfig(kind="vllm"), [], "vllm"),
        (EngineConfig(kind="vllm", url="http://there:8000"), [], "attached"),
        (EngineConfig(kind="fake", url="http://there:8000"), [], "fake"),
        (EngineConfig(url="http://there:8000"), [Gpu("x", 1)], "attached"),
    ],
)
def test_which_engine(engine, gpus, expected):
    assert engine_kind(engine, gpus) == expected


def test_on_nvidia_vllm_is_chosen_where_it_is_installed():
    engine = EngineConfig(vllm=VllmConfig(python="/opt/vllm/bin/python"))
    assert engine_kind(engine, [Gpu("x", 1)]) == "vllm"
    assert engine_kind(engine, []) == "mlx"


def test_our_own_packages_do_not_hide_vllms(tmp_path):
    assert import_path(tmp_path) == str(tmp_path)
    assert import_path(Path("/usr/lib/python3.11/site-packages")) == ""


def test_the_interpreter_is_part_of_the_settings(tmp_path):
    sources = layers({}, assignments=["engine.kind=vllm", "engine.vllm.python=/opt/vllm/python"])
    found = effective_settings(sources, {"HOME": str(tmp_path)})
    assert found.engine_kind == "vllm"
    assert found.settings.engine.vllm.python == "/opt/vllm/python"
    assert found.resolved.origin("engine.vllm.python") == "--set"
