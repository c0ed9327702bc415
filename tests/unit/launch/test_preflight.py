"""Where cold sessions are to be kept, looked at before the start."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore.config import StoreConfig
from kvstore.tiers.disk_folder import DiskFolder
from launch.errors import LaunchError, UsageError
from launch.preflight import check_tiers

OWNER = (
    "import sys; from pathlib import Path; from kvstore.tiers.disk_folder import DiskFolder;"
    " folder = DiskFolder(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()"
)


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(disk_path=str(tmp_path))


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder until its input ends."""
    command = [sys.executable, "-c", OWNER, str(tmp_path / "cold")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "mine\n"
        yield process


def test_the_folder_is_free_afterwards(store, tmp_path):
    check_tiers(store)
    DiskFolder(tmp_path / "cold").release(clean=False)


def test_a_folder_of_another_process_is_named_with_a_way_out(store, owner):
    with pytest.raises(LaunchError, match=f"pid {owner.pid}.*--data-dir FOLDER, or --disk 0"):
        check_tiers(store, in_use_patience_s=0)


def test_a_process_that_is_leaving_is_waited_for(store, owner, caplog):
    def leave() -> None:
        while "waiting until another process leaves" not in caplog.text:
            time.sleep(0.01)
        owner.stdin.close()

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    check_tiers(store, in_use_patience_s=60)
    leaving.join()
    assert caplog.text.count("waiting until another process leaves") == 1


def test_a_folder_that_cannot_be_made(store, tmp_path):
    (tmp_path / "cold").write_text("not a folder")
    with pytest.raises(LaunchError, match="--disk 0"):
        check_tiers(store)
    check_tiers(msgspec.structs.replace(store, disk_bytes=0))


@pytest.mark.parametrize("url", ["http://u:secret@host", "redis-host:6379", "redis://host:port"])
def test_what_is_no_url_of_redis_is_refused_without_its_password(store, url):
    with pytest.raises(UsageError, match=r"^store\.redis_url ") as refusal:
        check_tiers(msgspec.structs.replace(store, redis_url=url))
    assert "secret" not in str(refusal.value)


def test_a_redis_that_does_not_answer_is_only_warned_of(store, caplog):
    check_tiers(msgspec.structs.replace(store, redis_url="redis://:secret@127.0.0.1:1/0"))
    assert "going on without redis" in caplog.text
    assert "secret" not in caplog.text
