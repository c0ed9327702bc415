"""The wheel is a whole product, and ``launch/install.sh`` installs what is listed, by its hash."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.asking import asked
from tests.command_line import program
from tests.integration.launch.test_serve import Server
from tests.small_wheel import VERSION, small_wheel
from tests.unit.launch.test_locked_install import Checkout

ROOT = Path(__file__).parents[3]
# Tests are run by an environment that launch/install.sh made with uv: all wheels are in its cache.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
UV = shutil.which("uv") or str(CACHE / "thermocline" / "uv" / "bin" / "uv")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path(UV).exists(), reason="no uv here")]


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command at the checkout's root, where uv sees the date limit of pyproject.toml."""
    return program(*command, cwd=ROOT, timeout=240, env=os.environ | environ)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that has the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    made = run(UV, "venv", "--python", sys.executable, folder / "empty")
    assert made.returncode == 0, made.stderr
    bin = folder / "empty" / "bin"
    install = (UV, "pip", "install", "--python", bin / "python", wheel)
    done = run(*install, "--offline")
    if done.returncode != 0:  # another cache than the one that launch/install.sh filled
        done = run(*install)
    assert done.returncode == 0, done.stderr
    return bin


def test_it_says_its_version_and_its_commands(commands):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(commands / "thermocline", "--version").stdout == f"thermocline {version}\n"
    help = run(commands / "thermocline", "--help")
    assert help.returncode == 0 and "serve" in help.stdout


def test_it_names_what_is_missing_for_an_engine(commands, tmp_path):
    done = run(
        commands / "thermocline", "serve", "--engine", "mlx", THERMOCLINE_DATA_DIR=str(tmp_path)
    )
    assert done.returncode == 1
    assert "thermocline[mlx]" in done.stderr and "Traceback" not in done.stderr


def test_it_serves(commands, tmp_path):
    server = Server(tmp_path, program=[str(commands / "thermocline")])
    assert "version" in asked(f"{server.url}/version").content
    assert server.stop() == 0


def test_a_file_that_is_not_the_installed_one_is_named(commands, tmp_path):
    (file,) = commands.parent.glob("lib/*/site-packages/scheduler/sweeps.py")
    before = file.read_text()
    file.unlink()  # it may be a link to the installer's cache
    file.write_text(before + "\n")
    serve = (commands / "thermocline", "serve", "--engine", "fake", "--port", "0")
    refused = run(*serve, THERMOCLINE_DATA_DIR=str(tmp_path))
    file.write_text(before)
    assert refused.returncode == 1
    assert f"{file} is not the file that was installed with thermocline" in refused.stderr


def test_a_distribution_that_wrote_over_ours_is_named(commands, tmp_path):
    """Last, since the environment is not what it was after it."""
    python, data = commands / "python", {"THERMOCLINE_DATA_DIR": str(tmp_path)}
    serve = (commands / "thermocline", "serve", "--engine", "fake", "--port", "0")
    wheel = small_wheel(tmp_path, "scheduler", {"scheduler/__init__.py": "THEIRS = True\n"})
    done = run(UV, "pip", "install", "--python", python, "--offline", "--no-deps", wheel)
    assert done.returncode == 0, done.stderr
    for command in (serve, (commands / "thermocline", "doctor")):
        refused = run(*command, **data)
        assert refused.returncode == 1
        said = refused.stderr + refused.stdout
        assert "the distribution scheduler 9.9 has a package 'scheduler', as we have" in said
    done = run(UV, "pip", "uninstall", "--python", python, "scheduler")  # with our files
    assert done.returncode == 0, done.stderr
    refused = run(*serve, **data)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "scheduler" in refused.stderr and "an environment of its own" in refused.stderr


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
