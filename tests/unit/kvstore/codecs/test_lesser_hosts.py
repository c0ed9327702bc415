"""A processor that has less than this one gives the same bytes, by kernels and not by numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITES = ("test_golden.py", "test_kernels.py", "test_fused_rate.py", "test_fused_steps.py")
CHOSEN = "frozen or any_number_of_rows or told_of or gives_the_rows or kernels_give_the"


@pytest.mark.parametrize("without", ["avx512", "avx"])
def test_kernels_of_a_lesser_host_give_the_same_bytes(without, tmp_path):
    features = pytest.importorskip("kvstore.codecs.kernels.features").host_features()
    missing = [name for name in sorted(features) if name.startswith(without)]
    if not missing:
        pytest.skip(f"this host has no {without} itself")
    limits = {"NUMBA_CPU_FEATURES": ",".join(f"-{name}" for name in missing)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN]
    run = subprocess.run(
        [*command, *(str(HERE / name) for name in SUITES)],
        env={**os.environ, **limits, "NUMBA_CACHE_DIR": str(tmp_path)},
        cwd=HERE.parents[3],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
