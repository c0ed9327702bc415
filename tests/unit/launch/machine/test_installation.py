"""Other distributions that have packages of our names: the server does not start with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launch.machine.installation import require_own_packages
from tests.small_wheel import unpacked

ROOT = Path(__file__).parents[4]
CHECK = (
    "from launch.errors import LaunchError\n"
    "from launch.machine.installation import require_own_packages\n"
    "try:\n"
    "    require_own_packages()\n"
    "except LaunchError as error:\n"
    "    print(error)\n"
)


def said(*path: Path, code: str = CHECK) -> str:
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_as_it_is_it_is_ours():
    require_own_packages()


def test_one_that_hides_ours_is_named(tmp_path):
    other = unpacked(tmp_path, "scheduler-plus", {"scheduler/__init__.py": ""})
    found = said(other, ROOT)
    assert "the distribution scheduler-plus 9.9 has a package 'scheduler'" in found
    assert f"the package 'scheduler' is {other}/scheduler/__init__.py" in found
    assert "an environment of its own" in found


def test_one_that_ours_hides_is_named_too(tmp_path):
    """An engine's process may find it first: it does not look into the working directory."""
    other = unpacked(tmp_path, "kv", {"kvstore.py": ""})
    assert "the distribution kv 9.9 has a package 'kvstore'" in said(ROOT, other)


def test_a_folder_without_a_distribution_is_seen(tmp_path):
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "__init__.py").touch()
    find = "import importlib.util as u; print(u.find_spec('engines').origin)"
    assert said(tmp_path, ROOT, code=find).startswith(str(tmp_path))
    program = f"import sys; sys.path.append({str(tmp_path)!r})\n{CHECK}"
    assert said(ROOT, code=program) == ""  # after ours it does no harm
