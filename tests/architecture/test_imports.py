"""What may import what, and what must stay out of the gateway's process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("mlx", "mlx_lm", "vllm", "torch", "transformers", "numba", "huggingface_hub", "gguf")


def test_imports_go_one_way():
    program = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert program, "import-linter is not installed; run: bash launch/install.sh test"
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.parametrize(
    "module", ["launch.cli", "launch.serve", "launch.plan_view", "launch.doctor", "gateway.app"]
)
def test_the_control_plane_stays_light(module):
    assert not loaded_by(module) & {*HEAVY}


def test_help_needs_neither_the_server_nor_the_http_client():
    assert not loaded_by("launch.cli") & {"fastapi", "aiohttp", "numpy"}


def loaded_by(module: str) -> set[str]:
    """Everything in ``sys.modules`` of a fresh process that imports ``module``."""
    code = f"import sys, {module}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())
