"""Other distributions that have packages of our names: the server does not start with them."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from engines.config import EngineConfig, VllmConfig
from engines.vllm_environment.environment import import_path
from kvstore.config import StoreConfig
from launch.errors import LaunchError
from launch.machine.installation import FOLDER, find_python, require_own_packages, require_vllm
from launch.machine.resources import Gpu, parse_gpus
from launch.settings.effective_settings import engine_kind
from tests.command_line import program
from tests.small_wheel import unpacked

ROOT = Path(__file__).parents[4]
CHECK = (
    "from launch.errors import LaunchError\n"
    "from launch.machine.installation import require_own_packages\n"
    "try:\n"
    "    require_own_packages()\n"
    "except LaunchError as error:\n"
    "    print(error)\n"
)


def said(*path: Path, code: str = CHECK) -> str:
    run = program(
        sys.executable,
        "-P",
        "-c",
        code,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_as_it_is_it_is_ours():
    require_own_packages()


def test_one_that_hides_ours_is_named(tmp_path):
    other = unpacked(tmp_path, "scheduler-plus", {"scheduler/__init__.py": ""})
    found = said(other, ROOT)
    assert "the distribution scheduler-plus 9.9 has a package 'scheduler'" in found
    assert f"the package 'scheduler' is {other}/scheduler/__init__.py" in found
    assert "an environment of its own" in found


def test_one_that_ours_hides_is_named_too(tmp_path):
    """An engine's process may find it first: it does not look into the working directory."""
    other = unpacked(tmp_path, "kv", {"kvstore.py": ""})
    assert "the distribution kv 9.9 has a package 'kvstore'" in said(ROOT, other)


def test_a_folder_without_a_distribution_is_seen(tmp_path):
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "__init__.py").touch()
    find = "import importlib.util as u; print(u.find_spec('engines').origin)"
    assert said(tmp_path, ROOT, code=find).startswith(str(tmp_path))
    program = f"import sys; sys.path.append({str(tmp_path)!r})\n{CHECK}"
    assert said(ROOT, code=program) == ""  # after ours it does no harm


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
        (StoreConfig(), False),
    ],
)
def test_redis_is_needed_beside_vllm_where_it_is_used(tmp_path, store, asked):
    """A Python that has everything but redis-py."""
    found = {
        "vllm": "0.32.1",
        "cpu": True,
        "plugin": True,
        "plugin_version": version("thermocline"),
    }
    lacking, whole = (json.dumps({**found, "missing": x}) for x in (["redis"], []))
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
        (EngineConfig(vllm=VllmConfig(python="/opt/vllm/python")), [Gpu("x", 1)], "vllm"),
        (EngineConfig(vllm=VllmConfig(python="/opt/vllm/python")), [], "mlx"),
    ],
)
def test_which_engine(engine, gpus, expected):
    assert engine_kind(engine, gpus) == expected


def test_our_own_packages_do_not_hide_vllms(tmp_path):
    assert import_path(tmp_path) == str(tmp_path)
    assert import_path(Path("/usr/lib/python3.11/site-packages")) == ""
