"""Ports, folders of cold sessions, memory and the secret, looked at before the start."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from gateway.config import GatewayConfig
from kvstore.config import StoreConfig
from kvstore.tiers.disk_folder import DiskFolder
from launch.errors import LaunchError, UsageError
from launch.serve.preflight import (
    check_memory,
    check_tiers,
    listen,
    sole_server,
    take_path,
    take_port,
)
from launch.serve.secret import NUM_BYTES, server_secret
from tests.waiting import until

GIB = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(disk_path=str(tmp_path))


def test_the_folder_is_free_afterwards(store, tmp_path):
    check_tiers(store)
    DiskFolder(tmp_path / "cold").release(clean=False)


def test_a_second_server_is_refused_at_once_and_the_first_named(tmp_path):
    said = rf"{tmp_path} belongs to a server that runs \(process {os.getpid()}\)"
    with sole_server(tmp_path), pytest.raises(LaunchError, match=said), sole_server(tmp_path):
        pass
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


def test_a_folder_that_is_in_use_is_named_with_a_way_out(store, tmp_path):
    owner = DiskFolder(tmp_path / "cold")
    with pytest.raises(LaunchError, match=f"pid {os.getpid()}.*--data-dir FOLDER, or --disk 0"):
        check_tiers(store, in_use_wait_s=0)
    owner.release(clean=False)


def test_a_process_that_is_leaving_is_waited_for(store, tmp_path, caplog):
    owner = DiskFolder(tmp_path / "cold")
    waiting = "waiting up to 60 s until another process leaves"

    def leave() -> None:
        until(lambda: waiting in caplog.text)
        owner.release(clean=False)

    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    check_tiers(store, in_use_wait_s=60)
    leaving.join()
    assert caplog.text.count(waiting) == 1


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
    assert "continuing without Redis" in caplog.text
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


def test_it_is_made_once_and_for_its_owner_only(tmp_path):
    folder = tmp_path / "data"
    secret = server_secret(folder)
    assert len(secret) == NUM_BYTES
    assert server_secret(folder) == secret
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [x.name for x in folder.iterdir()] == ["secret"]
    assert server_secret(tmp_path / "other") != secret


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path):
    path, synced = tmp_path / "secret", []

    def sync(descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            synced.append(("folder", path.exists()))
        else:
            synced.append((status.st_size, path.exists()))
        os.fsync(descriptor)

    server_secret(tmp_path, sync)
    assert synced == [(NUM_BYTES, False), ("folder", True)]
    server_secret(tmp_path, sync)
    assert len(synced) == 2  # nothing is written for one that exists


def test_a_draft_that_a_power_cut_left_does_no_harm(tmp_path):
    (tmp_path / f".secret.{os.getpid()}").write_bytes(b"")
    assert len(server_secret(tmp_path)) == NUM_BYTES


@pytest.mark.parametrize(
    ("mode", "length", "words"),
    [(0o644, NUM_BYTES, "chmod 600"), (0o600, 5, "damaged; remove it")],
)
def test_one_that_others_can_read_or_that_was_cut_short_is_refused(tmp_path, mode, length, words):
    server_secret(tmp_path)
    os.truncate(tmp_path / "secret", length)
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(LaunchError, match=words):
        server_secret(tmp_path)


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LaunchError, match="--data-dir"):
        server_secret(tmp_path / "file" / "data")
