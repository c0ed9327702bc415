"""The folder of a server's sockets and temporary files, and who removes it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from engines.runtime_folder import (
    LOCK,
    fresh_scratch,
    held,
    runtime_folder,
)
from launch.machine.folders import server_folder

GATEWAY = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from engines.runtime_folder import runtime_folder\n"
    "with runtime_folder(Path(sys.argv[1]), sys.argv[2]) as folder:\n"
    "    print(folder, flush=True)\n"
    "    time.sleep(600)\n"
)
ENGINE = (
    "import sys\n"
    "from pathlib import Path\n"
    "from engines.runtime_folder import held\n"
    "with held(Path(sys.argv[1]), lambda: True):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()\n"
)


@contextmanager
def process(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def line_of(child: subprocess.Popen[str]) -> str:
    return child.stdout.readline().strip()


def test_it_is_private_and_gone_at_the_end(tmp_path):
    with runtime_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "http.sock").touch()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prefix", ["", "thermocline-"])
def test_files_of_a_killed_server_are_removed_by_the_next(tmp_path, prefix):
    (tmp_path / "thermocline-of-something-else").mkdir()
    with process(GATEWAY, tmp_path, prefix) as living, process(GATEWAY, tmp_path, prefix) as dying:
        kept, left = Path(line_of(living)), Path(line_of(dying))
        dying.send_signal(signal.SIGKILL)
        dying.wait()
        with runtime_folder(tmp_path, prefix):
            assert kept.exists() and not left.exists()
    assert (tmp_path / "thermocline-of-something-else").exists()


def test_an_engine_keeps_the_folder_of_its_killed_gateway_until_it_ends(tmp_path):
    with process(GATEWAY, tmp_path, "") as gateway:
        folder = Path(line_of(gateway))
        with process(ENGINE, folder) as engine:
            assert line_of(engine) == "held"
            gateway.send_signal(signal.SIGKILL)
            gateway.wait()
            with runtime_folder(tmp_path):
                assert folder.exists()
            engine.stdin.close()
            assert engine.wait() == 0
    assert not folder.exists()


def test_an_engine_waits_for_a_killed_gateway_that_the_system_is_still_closing(tmp_path):
    with process(GATEWAY, tmp_path, "") as gateway:
        folder = Path(line_of(gateway))
        with process(ENGINE, folder) as engine:
            assert line_of(engine) == "held"
            still_open = os.open(folder / LOCK, os.O_RDWR)
            fcntl.flock(still_open, fcntl.LOCK_SH)
            gateway.send_signal(signal.SIGKILL)
            gateway.wait()
            engine.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                engine.wait(0.3)  # one that does not wait has left by then
            os.close(still_open)
            assert engine.wait() == 0
    assert not folder.exists()


def test_an_engine_leaves_the_folder_to_a_gateway_that_lives(tmp_path):
    with runtime_folder(tmp_path) as folder:
        with held(folder, lambda: False):
            pass
        assert (folder / LOCK).exists()
    with held(tmp_path, lambda: False):
        pass
    assert tmp_path.exists(), "no gateway made it"


def test_links_are_not_followed(tmp_path):
    elsewhere, base = tmp_path / "elsewhere", tmp_path / "base"
    elsewhere.mkdir()
    base.mkdir()
    (elsewhere / LOCK).touch()
    (base / "planted").symlink_to(elsewhere)
    with runtime_folder(base):
        assert (elsewhere / LOCK).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders of other users")
def test_folders_of_other_users_are_left(tmp_path):
    theirs = tmp_path / "thermocline-x"
    theirs.mkdir()
    (theirs / LOCK).touch()
    os.chown(theirs, 65534, 65534)
    with runtime_folder(tmp_path, "thermocline-"):
        assert theirs.exists()


def test_scratch_is_empty_for_each_life(tmp_path):
    (fresh_scratch(tmp_path) / "half-written").touch()
    scratch = fresh_scratch(tmp_path)
    assert list(scratch.iterdir()) == [] and scratch.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def base() -> Iterator[Path]:
    """Short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp") as name:
        yield Path(name)


def test_a_server_in_the_cache_folder_removes_files_that_were_left_elsewhere(base: Path) -> None:
    elsewhere = base / "elsewhere"
    elsewhere.mkdir()
    with process(GATEWAY, elsewhere, "thermocline-") as dying:
        left = Path(line_of(dying))
        dying.send_signal(signal.SIGKILL)
        dying.wait()
    assert left.exists()
    with server_folder(base / "cache", {"XDG_RUNTIME_DIR": str(elsewhere)}) as own:
        assert own.parent == base / "cache" / "run" and not left.exists()
