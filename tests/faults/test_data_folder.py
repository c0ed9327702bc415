"""The data folder of a running engine turns full, or read-only: requests go on, the rest heals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.serving_process import NEW, NUM_WHILE, history
from tests.integration.mlx_owner.harness import engine, session

pytestmark = pytest.mark.mlx

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full", "read-only"])
async def test_an_engine_goes_on_and_leaves_nothing_half_written(tmp_path: Path, fault: str):
    command = [sys.executable, "-m", "tests.faults.serving_process", str(tmp_path), fault]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    async with engine("llama", tmp_path) as it:
        kept = {x.id for x in it.store.records()}
        assert kept >= {"0", str(NUM_WHILE + 1)}
        assert "1" not in kept  # deleted while nothing could be written
        for name in sorted(kept):
            prompt = history(int(name)) + NEW
            right = await it.turn(prompt)
            back = await it.turn(prompt, session(name))
            assert back.tokens == right.tokens
            assert back.cache.source == "cold-disk"
        assert "corrupt" not in it.store.stats().counters
