"""What holds for all tests."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Threads of several processes would wait for each other, spinning: a forced call at vLLM took four
# times as long. Set before numpy and torch read them; engines that a test starts have them as well.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

USUAL_EXAMPLES = 15
THOROUGH_EXAMPLES = 150
# Fixtures that take a minute to make, or a quarter of one.
SHARED = ("vllm_stack", "shared_engine", "vllm_server", "sample_stack")


def pytest_addoption(parser: pytest.Parser) -> None:
    explanation = f"{THOROUGH_EXAMPLES} examples of each property; tests marked thorough as well"
    parser.addoption("--thorough", action="store_true", help=explanation)


def pytest_configure(config: pytest.Config) -> None:
    """Have all processes of a run, servers as well, keep what they compile in one folder."""
    os.environ.setdefault("NUMBA_CACHE_DIR", str(_own_folder() / "numba"))
    _choose_examples(THOROUGH_EXAMPLES if config.getoption("--thorough") else USUAL_EXAMPLES)


def _choose_examples(count: int) -> None:
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:  # as in vLLM's environment
        return
    # A machine that is busy with something else must not fail a test.
    slow = [HealthCheck.too_slow]
    settings.register_profile("ours", max_examples=count, deadline=None, suppress_health_check=slow)
    settings.load_profile("ours")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked thorough, unless that is asked for; group the others.

    A group goes to one process: the tests of a file, or all that share an engine of vLLM.
    """
    if not config.getoption("--thorough"):
        left_out = [x for x in items if x.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [x for x in items if not x.get_closest_marker("thorough")]
    if config.getoption("loadgroup", default=False):  # a worker's "dist" is always "no"
        groups = {x: _group_of(x) for x in items}
        for item, group in groups.items():
            item.add_marker(pytest.mark.xdist_group(group))
        items.sort(key=lambda x: groups[x] not in SHARED)  # they take longest


def _group_of(item: pytest.Item) -> str:
    shared = [x for x in SHARED if x in getattr(item, "fixturenames", ())]
    marks = [str(x.args[0]) for x in item.iter_markers("share")]
    return next(iter([*shared, *marks, str(item.path)]))


def _own_folder() -> Path:
    """Return a folder that only this user can change, the same for the next run if possible."""
    folder = Path(tempfile.gettempdir(), f"thermocline-tests-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_own = found.st_uid == os.getuid() and not found.st_mode & 0o077 and not folder.is_symlink()
    return folder if is_own else Path(tempfile.mkdtemp())


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Take away the log of a command that ran in this process: its stream is closed by now."""
    root = logging.getLogger()
    level = root.level
    yield
    left = [x for x in root.handlers if type(x) is logging.StreamHandler]
    for handler in left:
        root.removeHandler(handler)
    if left:
        root.setLevel(level)
        logging.captureWarnings(False)


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
    """Return how many processes ``-n auto`` starts: one more than cores, at most four.

    A third of the time of a test is a wait: for a process, a deadline, an answer.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min((cores or 1) + 1, 4)
