"""What holds for all tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

try:  # vLLM's environment has none
    from hypothesis import settings
except ImportError:
    pass
else:
    # A machine that is busy with something else must not fail a test.
    settings.register_profile("busy machine", deadline=None)
    settings.load_profile("busy machine")


def pytest_configure() -> None:
    """Have all processes of a run, servers as well, keep what they compile in one folder."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(_own_folder() / "numba"))


def _own_folder() -> Path:
    """Return a folder that only this user can change, the same for the next run if possible."""
    folder = Path(tempfile.gettempdir(), f"thermocline-tests-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_own = found.st_uid == os.getuid() and not found.st_mode & 0o077 and not folder.is_symlink()
    return folder if is_own else Path(tempfile.mkdtemp())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write a test's output so that xdist can send it: no lone surrogates."""
    report = yield
    report.sections[:] = [(title, _sendable(text)) for title, text in report.sections]
    return report


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@pytest.hookimpl(optionalhook=True)  # vLLM's environment has no xdist
def pytest_xdist_auto_num_workers(config: Any) -> int:
    """Return how many processes ``-n auto`` starts: one for a core, at most four."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, 4)
