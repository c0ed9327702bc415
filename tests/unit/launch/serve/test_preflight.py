"""Ports, folders of cold sessions and memory, looked at before the start."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gateway.config import GatewayConfig
from kvstore.config import StoreConfig
from kvstore.tiers.disk_folder import DiskFolder
from launch.errors import LaunchError, UsageError
from launch.machine.resources import machine_memory
from launch.serve.preflight import (
    check_memory,
    check_tiers,
    listen,
    sole_server,
    take_path,
    take_port,
)

OWNER = (
    "import sys; from pathlib import Path; from kvstore.tiers.disk_folder import DiskFolder;"
    " folder = DiskFolder(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()"
)
GIB = 1 << 30


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
        assert process.stdout.readline() == "mine\n"
        yield process


def test_the_folder_is_free_afterwards(store, tmp_path):
    check_tiers(store)
    DiskFolder(tmp_path / "cold").release(clean=False)


def test_a_second_server_is_refused_at_once_and_the_first_named(tmp_path):
    program = (
        "import sys; from pathlib import Path; from launch.serve.preflight import sole_server\n"
        "with sole_server(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()"
    )
    command, pipe = [sys.executable, "-c", program, str(tmp_path)], subprocess.PIPE
    for _ in range(2):  # a killed one leaves nothing behind that counts
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first:
            assert first.stdout.readline() == "mine\n"
            said = rf"{tmp_path} belongs to a server that runs \(process {first.pid}\)"
            with pytest.raises(LaunchError, match=said), sole_server(tmp_path):
                pass
            first.kill()
    with sole_server(tmp_path):
        pass


def test_each_worker_of_vllm_has_a_folder_of_its_own(store, tmp_path):
    rank = DiskFolder(tmp_path / "vllm-rank-1" / "cold")
    with pytest.raises(LaunchError, match="vllm-rank-1"):
        check_tiers(store, vllm_ranks=2, in_use_wait_s=0)
    rank.release(clean=False)
    check_tiers(store, vllm_ranks=2)
    little = msgspec.structs.replace(store, disk_bytes=6 << 20)
    check_tiers(little)
    with pytest.raises(UsageError, match="disk_bytes"):
        check_tiers(little, vllm_ranks=2)


def test_a_folder_of_another_process_is_named_with_a_way_out(store, owner):
    with pytest.raises(LaunchError, match=f"pid {owner.pid}.*--data-dir FOLDER, or --disk 0"):
        check_tiers(store, in_use_wait_s=0)


def test_a_process_that_is_leaving_is_waited_for(store, owner, caplog):
    def leave() -> None:
        while "until another process leaves" not in caplog.text:
            time.sleep(0.01)
        owner.stdin.close()

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    check_tiers(store, in_use_wait_s=60)
    leaving.join()
    assert caplog.text.count("waiting up to 60 s until another process leaves") == 1


def test_a_folder_that_cannot_be_made(store, tmp_path):
    (tmp_path / "cold").write_text("not a folder")
    with pytest.raises(LaunchError, match="--disk 0"):
        check_tiers(store)
    check_tiers(msgspec.structs.replace(store, disk_bytes=0))


def test_a_limit_that_holds_hardly_a_blob_is_refused(store):
    too_little = msgspec.structs.replace(store, disk_bytes=1 << 20)
    with pytest.raises(UsageError, match=r"^store\.disk_bytes is 1048576, .*4 MiB or more"):
        check_tiers(too_little)


@pytest.mark.parametrize("url", ["http://u:secret@host", "redis-host:6379", "redis://host:port"])
def test_a_url_that_is_not_of_redis_is_refused_without_its_password(store, url):
    with pytest.raises(UsageError, match=r"^store\.redis_url ") as refusal:
        check_tiers(msgspec.structs.replace(store, redis_url=url))
    assert "secret" not in str(refusal.value)


def test_a_redis_that_does_not_answer_is_only_warned_of(store, caplog):
    check_tiers(msgspec.structs.replace(store, redis_url="redis://:secret@127.0.0.1:1/0"))
    assert "going on without redis" in caplog.text
    assert "secret" not in caplog.text


# ---- memory that a GPU shares


def check(**given) -> None:
    usual = {
        "weights": 70 * GIB,
        "hot_bytes": 20 * GIB,
        "ram_bytes": 8 * GIB,
        "free_bytes": 12 * GIB,
        "available": 110 * GIB,
    }
    check_memory(**usual | given)


def test_a_model_that_fits_is_started():
    check()
    check(weights=None, available=40 * GIB)  # not downloaded yet: their size is unknown
    check(free_bytes=0, available=1)  # the check is off


def test_a_model_that_would_hang_the_machine_is_not_started():
    with pytest.raises(LaunchError) as caught:
        check(available=110 * GIB - 1)
    for words in ("110 GiB are needed", "70 GiB of weights", "12 GiB to stay free", "--hot"):
        assert words in str(caught.value)


def test_where_memory_is_unknown_that_is_said(caplog):
    check(available=None)
    assert "memory is not watched" in caplog.text


def test_the_machines_memory_is_read_from_meminfo(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  128000000 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\n")
    assert machine_memory(meminfo) == 2 << 20
    meminfo.write_text("MemTotal:  128000000 kB\n")
    assert machine_memory(meminfo) is None
    assert machine_memory(tmp_path / "missing") is None


CONFIG = GatewayConfig(port=0)


def test_no_client_hangs_on_a_port_that_does_not_serve_yet():
    with take_port(CONFIG) as sock:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(sock.getsockname(), timeout=10)
        listen(sock, CONFIG)
        socket.create_connection(sock.getsockname(), timeout=10).close()


def test_of_two_servers_that_start_together_one_is_refused():
    with take_port(CONFIG) as first:
        config = GatewayConfig(port=first.getsockname()[1])
        with take_port(config) as second:
            listen(first, config)
            with pytest.raises(LaunchError, match="choose another with --port"):
                listen(second, config)


def test_a_unix_socket_is_this_users_own_and_gone_at_the_end(tmp_path: Path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a killed server leaves it
    with take_path(str(path)) as sock:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listen(sock, CONFIG)
        with pytest.raises(LaunchError, match="in use"), take_path(str(path)):
            pass
    assert not path.exists()
    path.write_text("another program's file")
    with pytest.raises(LaunchError, match="in use"), take_path(str(path)):
        pass
    assert path.read_text()


def test_a_unix_socket_that_does_not_listen_yet_is_taken_all_the_same(tmp_path: Path):
    path = str(tmp_path / "s")
    with take_path(path):
        with pytest.raises(LaunchError, match="in use"), take_path(path):
            pass
        assert Path(path).is_socket()
    with take_path(path):
        pass


def test_a_server_leaves_a_unix_socket_that_another_has_put_in_place_of_its_own(tmp_path: Path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        with take_path(str(path)):
            path.unlink()
            other.bind(str(path))
        assert path.is_socket()
