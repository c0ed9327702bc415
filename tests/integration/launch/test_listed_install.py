"""``launch/install.sh`` with a list of hashes and the real uv: a changed file is not installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch.test_wheel import UV
from tests.small_wheel import VERSION, small_wheel
from tests.unit.launch.test_locked_install import Checkout

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path(UV).exists(), reason="no uv here")]
NAME = "listed-thing"
ENVIRONMENTS = {"serve": ".venv", "vllm": ".venv-vllm"}


class Installed(Checkout):
    """A checkout with empty environments, and one package in reach, which both lists have."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.lock.parent.mkdir()
        self.env |= {
            "PATH": f"{Path(UV).parent}:{os.environ['PATH']}",
            "UV_CACHE_DIR": str(folder / "cache"),
            "UV_FIND_LINKS": str(self.wheels),
            "UV_NO_INDEX": "1",
            "UV_OFFLINE": "1",
        }
        for name in ENVIRONMENTS.values():
            made = [UV, "venv", "--quiet", "--python", sys.executable, str(self.root / name)]
            subprocess.run(made, check=True, env=self.env)

    def publish(self, text: str) -> str:
        """Put a release of the package in reach; returns its hash."""
        wheel = small_wheel(self.wheels, NAME, {"listed_thing.py": text})
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    def list(self, words: str) -> None:
        for path in (self.lock, self.vllm_lock):
            path.write_text(f"{NAME}=={VERSION}{words}\n")

    def installed(self, purpose: str) -> list[Path]:
        return list((self.root / ENVIRONMENTS[purpose]).glob("lib/*/site-packages/listed_thing*"))


@pytest.fixture
def checkout(tmp_path: Path) -> Installed:
    made = Installed(tmp_path)
    right = made.publish("WHO = 'its author'\n")
    made.list(f" \\\n    --hash=sha256:{right}")
    return made


def test_what_is_listed_is_installed(checkout: Installed) -> None:
    done = checkout.install("vllm")
    assert done.returncode == 0, done.stderr
    assert len(checkout.installed("vllm")) == 2  # the module and its metadata


@pytest.mark.parametrize("purpose", ENVIRONMENTS)
def test_a_file_under_a_changed_hash_is_not(checkout: Installed, purpose: str) -> None:
    changed = checkout.publish("WHO = 'another'\n")
    done = checkout.install(purpose)
    assert done.returncode != 0
    assert "mismatch" in done.stderr.lower() and changed in done.stderr
    assert checkout.installed(purpose) == []


@pytest.mark.parametrize("purpose", ENVIRONMENTS)
def test_nor_is_one_without_a_hash(checkout: Installed, purpose: str) -> None:
    checkout.list("")
    done = checkout.install(purpose)
    assert done.returncode != 0 and "hash" in done.stderr
    assert checkout.installed(purpose) == []
