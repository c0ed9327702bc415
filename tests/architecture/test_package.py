"""What is shipped, and that the names in tables of import strings exist."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvstore.codecs.names import READY
from kvstore.codecs.presets import codec_by_name
from launch.engine_start import ENGINES, engine_factory

ROOT = Path(__file__).parents[2]
ROOMS = {"thermocline", "gateway", "engines", "kvstore", "scheduler", "launch"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> list[str]:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return archive.namelist()


def test_the_wheel_holds_our_packages_and_nothing_else(wheel):
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == ROOMS


def test_the_wheel_holds_every_source_file_and_profile(wheel):
    sources = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for kind in ("*.py", "*.toml", "*.js", "*.css", "*.html", "*.svg", "*.LICENSE")
        for path in (ROOT / room).rglob(kind)
    }
    assert sources <= set(wheel)


def test_the_command_exists():
    (command,) = entry_points(group="console_scripts", name="thermocline")
    assert command.value == "launch.cli.main:main"
    assert callable(command.load())


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_engine_in_the_table_can_be_loaded(name):
    assert callable(engine_factory(name))


@pytest.mark.parametrize("name", sorted(READY))
def test_every_codec_in_the_table_can_be_loaded(name):
    assert codec_by_name(name).id.partition(".")[0] == name


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_says_what_it_is(room):
    assert importlib.import_module(room).__doc__


def test_the_sources_name_no_index_and_no_machine():
    """A developer's own lock file or index must not travel with the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "index" not in project["tool"]["uv"]
    assert "uv.lock" in (ROOT / ".gitignore").read_text()
