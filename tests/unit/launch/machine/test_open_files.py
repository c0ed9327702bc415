"""The limit of open files, in processes that may not raise it as they like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
# Gives up all privileges: root could raise a hard limit.
PROGRAM = """
import os, resource, sys
from launch.machine.open_files import LaunchError, raise_open_files
soft, hard, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    print(raise_open_files(kind), *resource.getrlimit(resource.RLIMIT_NOFILE))
except LaunchError as error:
    print("refused:", error)
"""


def limits(soft: int, hard: int, kind: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(soft), str(hard), kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_the_soft_limit_becomes_the_hard_one() -> None:
    # Not above this process's own limit, which mlx_lm lowers where a test has imported it.
    assert limits(200, 4096, "mlx") == "4096 4096 4096"


@pytest.mark.parametrize(("hard", "kind"), [(1024, "mlx"), (200, "fake")])
def test_too_low_a_limit_is_refused_with_a_sentence(hard: int, kind: str) -> None:
    said = limits(hard, hard, kind)
    assert said.startswith(f"refused: only {hard} files may be open")
    assert ("mlx_lm" in said) == (kind == "mlx")


def test_other_engines_need_less_than_mlx_lm() -> None:
    assert limits(256, 1024, "fake") == "1024 1024 1024"
