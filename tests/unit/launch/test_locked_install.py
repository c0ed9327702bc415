"""``launch/install.sh`` with a list of hashes, and a uv that only records its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.command_line import program

ROOT = Path(__file__).parents[3]
UV = """#!/bin/bash
echo "uv $*" >>"$ASKED"
[ "$1" = --version ] && exit
out=""
while [ $# -gt 0 ]; do
    [ "$1" = --output-file ] && out=$2
    shift
done
[ -n "$out" ] && printf 'a==1 \\\\\\n    --hash=sha256:00\\n' >"$out"
exit 0
"""


class Checkout:
    """A checkout, and lists of what is installed there that lie elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.lock = folder / "outside" / "locked.txt"
        self.vllm_lock = folder / "outside" / "locked-vllm.txt"
        self.root = folder / "checkout"
        (self.root / "launch").mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "install.sh", self.root / "launch")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        locks = {"THERMOCLINE_LOCK": str(self.lock), "THERMOCLINE_VLLM_LOCK": str(self.vllm_lock)}
        self.env = os.environ | locks
        self.env.pop("UV_PROJECT_ENVIRONMENT", None)

    def install(self, purpose: str) -> subprocess.CompletedProcess[str]:
        script = self.root / "launch" / "install.sh"
        return program("bash", script, purpose, env=self.env, timeout=120)


class Recorded(Checkout):
    """Its uv only notes how it was called."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked = folder / "asked"
        commands = folder / "bin"
        commands.mkdir()
        (commands / "uv").write_text(UV)
        (commands / "uv").chmod(0o755)
        for venv in (".venv", ".venv-vllm"):
            python = self.root / venv / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text("#!/bin/sh\nexit 0\n")
            python.chmod(0o755)
        self.env |= {"PATH": f"{commands}:{os.environ['PATH']}", "ASKED": str(self.asked)}

    def calls(self, words: str) -> list[str]:
        """The calls of uv with these words."""
        asked = self.asked.read_text().splitlines() if self.asked.exists() else []
        return [x for x in asked if words in x]

    def makes(self, purpose: str) -> str:
        """Install, and return what it says."""
        done = self.install(purpose)
        assert done.returncode == 0, done.stderr
        return done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def test_the_list_has_hashes_and_lies_where_it_is_asked_for(checkout: Recorded) -> None:
    said = checkout.makes("lock")
    assert checkout.lock.read_text().count("--hash=sha256") == 2  # and the sample model's
    assert "2 packages" in said
    compiled = checkout.calls("pip compile")
    assert len(compiled) == 2
    assert all("--generate-hashes" in x for x in compiled)
    assert not any("index" in x for x in compiled)


def test_the_tools_that_build_our_own_package_are_in_the_list(checkout: Recorded) -> None:
    keep = 'for x in "$@"; do case $x in *build.in) cp "$x" "$ASKED.build" ;; esac; done\n'
    uv = Path(checkout.env["PATH"].partition(":")[0]) / "uv"
    uv.write_text(UV.replace('out=""\n', 'out=""\n' + keep))
    checkout.install("lock")
    needs = Path(f"{checkout.asked}.build").read_text().splitlines()
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert needs == [*wanted, "editables"]  # hatchling's own, for an installation in place


def test_vllms_environment_has_a_list_of_its_own(checkout: Recorded) -> None:
    checkout.makes("lock-vllm")
    assert checkout.vllm_lock.exists() and not checkout.lock.exists()
    (compiled,) = checkout.calls("pip compile")
    assert "--generate-hashes" in compiled and "pyproject.toml:vllm" in compiled
    checkout.makes("vllm")
    (installed,) = checkout.calls("pip install")
    assert "--no-deps --require-hashes" in installed and installed.endswith(str(checkout.vllm_lock))
    assert ".venv-vllm" in installed


def test_a_list_that_cannot_be_made_is_not_written(checkout: Recorded) -> None:
    uv = Path(checkout.env["PATH"].partition(":")[0]) / "uv"
    uv.write_text(UV.replace("exit 0", "exit 1"))
    for purpose in ("lock", "lock-vllm"):
        assert checkout.install(purpose).returncode != 0
    assert not checkout.lock.exists() and not checkout.vllm_lock.exists()


def test_serving_is_installed_from_the_list_alone(checkout: Recorded) -> None:
    checkout.makes("lock")
    checkout.makes("serve")
    listed, ours = checkout.calls("pip install")
    assert "--no-deps --require-hashes --only-binary :all: --requirement" in listed
    assert "--no-deps --no-build-isolation --editable" in ours
    checkout.makes("serve")
    assert len(checkout.calls("pip install")) == 2  # the list is the same
    checkout.lock.write_text("b==2 --hash=sha256:01\n")
    checkout.makes("serve")
    assert len(checkout.calls("pip install")) == 4


@pytest.mark.parametrize("purpose", ["serve", "audit", "vllm", "audit-vllm"])
def test_without_the_list_the_error_names_the_command_that_makes_it(checkout, purpose):
    done = checkout.install(purpose)
    assert done.returncode == 1
    wanted = "lock-vllm" if "vllm" in purpose else "lock"
    assert done.stderr.strip().endswith(f"install.sh {wanted}")
    assert not checkout.calls("pip install")


def test_an_audit_fails_for_packages_that_it_cannot_look_up(checkout: Recorded) -> None:
    checkout.install("lock")
    checkout.install("audit")
    (asked,) = checkout.calls("pip-audit")
    assert "--strict --require-hashes" in asked
