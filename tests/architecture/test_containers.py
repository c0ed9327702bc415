"""The container files copy and install what the project says it is made of."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from engines.vllm_environment.environment import SUPPORTED

ROOT = Path(__file__).parents[2]
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
