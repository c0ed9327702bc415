"""Two processes share the tests of a run; those of a file stay together with their fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = """
import os, pathlib, pytest

@pytest.mark.parametrize("count", range(4))
def test_seen(count):
    pathlib.Path(__file__ + "." + os.environ["PYTEST_XDIST_WORKER"]).touch()
"""


def test_a_file_goes_to_one_process(tmp_path: Path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    for name in ("test_one.py", "test_two.py", "test_three.py"):
        (tmp_path / name).write_text(FILE)
    words = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", str(tmp_path)]
    inherited = {x: y for x, y in os.environ.items() if not x.startswith("PYTEST_")}
    done = subprocess.run(
        [*words, "-q", "-p", "no:cacheprovider", "-c", os.devnull],
        cwd=tmp_path,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "12 passed" in done.stdout, done.stdout + done.stderr
    seen = sorted(x.name for x in tmp_path.glob("test_*.py.gw*"))
    assert len(seen) == 3 and len({x.rpartition(".")[2] for x in seen}) == 2, seen
