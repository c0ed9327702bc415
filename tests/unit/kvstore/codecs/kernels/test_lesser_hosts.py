"""A processor that has less than this one gives the same bytes, by kernels and not by numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODECS = Path(__file__).parents[1]
SUITES = (
    *("rows/test_golden.py", "kernels/test_kernels.py", "rows/test_row_attention.py"),
    *("fixed_rate/test_fused_rate.py", "one_step/test_fused_loop.py"),
)
# Each shape of rows is compiled again: one for each width of vectors that an instruction set has.
CHOSEN = " or ".join(
    [
        "(test_golden and (tq3-16 or tq3-64 or tq3-80 or tq3-256 or tq4-128))",
        "(test_fused_rate and (frozen or kernels_give_the))",
        "(test_fused_loop and (frozen or predicted_from or kernels_give_the))",
        "any_number_of_rows",
        "(code_agrees and 3-64)",
    ]
)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "without",
    [
        # If only AVX-512 is taken away, LLVM 22 still goes by the processor, selects one of its
        # instructions and aborts. For real processors with AVX-VNNI alone (Alder Lake) it compiles.
        pytest.param(("avx512", "avx10", "avxvnni"), id="avx512"),
        pytest.param(("avx",), id="avx"),
    ],
)
def test_kernels_of_a_lesser_host_give_the_same_bytes(without, tmp_path):
    features = pytest.importorskip("kvstore.codecs.kernels.emit.emitter").host_features()
    missing = [name for name in sorted(features) if name.startswith(without)]
    if not any(name.startswith(without[0]) for name in missing):
        pytest.skip(f"this host has no {without[0]} itself")
    limits = {"NUMBA_CPU_FEATURES": ",".join(f"-{name}" for name in missing)}
    run = run_suites({**limits, "NUMBA_CACHE_DIR": str(tmp_path)})
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
