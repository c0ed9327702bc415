"""What is shipped, and that the names in tables of import strings exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from engines.vllm_environment.environment import SUPPORTED
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


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_engine_in_the_table_can_be_loaded(name):
    assert callable(engine_factory(name))


def test_the_sources_name_no_index_and_no_machine():
    """A developer's own lock file or index must not travel with the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "index" not in project["tool"]["uv"]
    assert "uv.lock" in (ROOT / ".gitignore").read_text()


LINES = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
RELEASE = re.compile(r"## \[(Unreleased|\d+\.\d+\.\d+)\](?: - \d{4}-\d{2}-\d{2})?")


def test_releases_have_a_number_and_a_date_newest_first():
    heads = [line for line in LINES if line.startswith("## ")]
    found = [RELEASE.fullmatch(head) for head in heads]
    assert all(found), heads
    assert heads[0] == "## [Unreleased]"
    assert all(" - " in head for head in heads[1:])
    numbers = [tuple(map(int, x[1].split("."))) for x in found[1:] if x]
    assert numbers == sorted(set(numbers), reverse=True)


def test_a_version_that_was_released_is_the_newest_in_the_changelog():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    released = [found[1] for line in LINES if (found := RELEASE.fullmatch(line))][1:]
    assert not released or released[0] == version


def test_every_release_has_each_section_once():
    seen: set[str] = set()
    for line in LINES:
        if line.startswith("## "):
            seen = set()
        elif line.startswith("### "):
            name = line.removeprefix("### ")
            assert name in SECTIONS - seen
            seen.add(name)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDER = ROOT / "launch" / "containers"
# What only tests/vllm needs beside vLLM.
FOR_TESTS = ("pytest", "safetensors")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.Dockerfile")), ids=lambda x: x.name)
def test_every_package_is_copied_and_let_through(path):
    rooms = set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    copied = set(re.findall(r"^COPY (\w+) \1$", path.read_text(), re.MULTILINE))
    let_through = set(re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert copied == rooms
    assert let_through == rooms | {"LICENSE"}


def test_vllms_interpreter_gets_what_the_plug_in_needs():
    text = (FOLDER / "cuda.Dockerfile").read_text()
    installed = set(
        re.findall(r"'([^']+)'", text.partition("python3 -m pip")[2].partition("&&")[0])
    )
    needed = {x for x in PROJECT["dependency-groups"]["vllm"] if not x.startswith(FOR_TESTS)}
    assert installed == needed


def test_the_image_is_of_the_version_that_the_plug_in_is_made_for():
    image = re.findall(r"^FROM vllm/\S+:v(\S+)$", (FOLDER / "cuda.Dockerfile").read_text(), re.M)
    script = (ROOT / "launch" / "install.sh").read_text()
    pinned = re.findall(r"^ *vllm='vllm==(\S+)\*'$", script, re.MULTILINE)
    assert tuple(pinned) == SUPPORTED
    assert len(image) == 1 and image[0].startswith(pinned[0])
