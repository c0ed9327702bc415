"""``launch/install.sh`` with a list of hashes and the real uv: a changed file is not installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch.test_wheel import UV
from tests.small_wheel import VERSION, small_wheel

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path(UV).exists(), reason="no uv here")]
NAME = "listed-thing"
ENVIRONMENTS = {"serve": ".venv", "vllm": ".venv-vllm"}


class Checkout:
    """A checkout with empty environments, and one package in reach, which a list has."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        (self.root / "launch").mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "install.sh", self.root / "launch")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.list = folder / "locked.txt"
        self.env = os.environ | {
            "PATH": f"{Path(UV).parent}:{os.environ['PATH']}",
            "THERMOCLINE_LOCK": str(self.list),
            "THERMOCLINE_VLLM_LOCK": str(self.list),
            "UV_CACHE_DIR": str(folder / "cache"),
            "UV_FIND_LINKS": str(self.wheels),
            "UV_NO_INDEX": "1",
            "UV_OFFLINE": "1",
        }
        self.env.pop("UV_PROJECT_ENVIRONMENT", None)
        for name in ENVIRONMENTS.values():
            made = [UV, "venv", "--quiet", "--python", sys.executable, str(self.root / name)]
            subprocess.run(made, check=True, env=self.env)

    def publish(self, text: str) -> str:
        """Put a release of the package in reach; returns its hash."""
        wheel = small_wheel(self.wheels, NAME, {"listed_thing.py": text})
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    def install(self, purpose: str) -> subprocess.CompletedProcess[str]:
        script = str(self.root / "launch" / "install.sh")
        command = ["bash", script, purpose]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120)

    def installed(self, purpose: str) -> list[Path]:
        return list((self.root / ENVIRONMENTS[purpose]).glob("lib/*/site-packages/listed_thing*"))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    right = made.publish("WHO = 'its author'\n")
    made.list.write_text(f"{NAME}=={VERSION} \\\n    --hash=sha256:{right}\n")
    return made


def test_what_is_listed_is_installed(checkout: Checkout) -> None:
    done = checkout.install("vllm")
    assert done.returncode == 0, done.stderr
    assert len(checkout.installed("vllm")) == 2  # the module and its metadata


@pytest.mark.parametrize("purpose", ENVIRONMENTS)
def test_a_file_under_a_changed_hash_is_not(checkout: Checkout, purpose: str) -> None:
    changed = checkout.publish("WHO = 'another'\n")
    done = checkout.install(purpose)
    assert done.returncode != 0
    assert "mismatch" in done.stderr.lower() and changed in done.stderr
    assert checkout.installed(purpose) == []


@pytest.mark.parametrize("purpose", ENVIRONMENTS)
def test_nor_is_one_without_a_hash(checkout: Checkout, purpose: str) -> None:
    checkout.list.write_text(f"{NAME}=={VERSION}\n")
    done = checkout.install(purpose)
    assert done.returncode != 0 and "hash" in done.stderr
    assert checkout.installed(purpose) == []
