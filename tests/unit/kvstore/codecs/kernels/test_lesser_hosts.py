"""A processor that has less than this one gives the same bytes, by kernels and not by numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODECS = Path(__file__).parents[1]
SUITES = (
    *("rows/test_golden.py", "kernels/test_kernels.py"),
    *("fixed_rate/test_fused_rate.py", "one_step/test_fused_steps.py"),
)
CHOSEN = "frozen or any_number_of_rows or told_of or gives_the_rows or kernels_give_the"


@pytest.mark.slow
@pytest.mark.parametrize("without", ["avx512", "avx"])
def test_kernels_of_a_lesser_host_give_the_same_bytes(without, tmp_path):
    features = pytest.importorskip("kvstore.codecs.kernels.emit.features").host_features()
    missing = [name for name in sorted(features) if name.startswith(without)]
    if not missing:
        pytest.skip(f"this host has no {without} itself")
    limits = {"NUMBA_CPU_FEATURES": ",".join(f"-{name}" for name in missing)}
    run = run_suites({**limits, "NUMBA_CACHE_DIR": str(tmp_path)})
    if run.returncode < 0:
        # Seen once, on a machine that nobody could look at: does it happen again?
        print(f"signal {-run.returncode}: {run.stderr[:4000]}")
        run = run_suites({**limits, "NUMBA_CACHE_DIR": str(tmp_path / "again")})
    assert run.returncode == 0, f"{run.stdout[-4000:]}\n{run.stderr[:4000]}"


def run_suites(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN]
    return subprocess.run(
        [*command, *(str(CODECS / name) for name in SUITES)],
        env={**os.environ, **environment},
        cwd=CODECS.parents[3],
        capture_output=True,
        text=True,
    )
