"""Commands find the server that runs on the same machine."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from launch.machine.folders import ADDRESS_FILE, USUAL_ADDRESS, address_here, announced
from launch.remote.server import server_url


def test_a_server_that_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    environ = {"THERMOCLINE_DATA_DIR": str(tmp_path)}
    assert address_here(environ) == USUAL_ADDRESS
    with announced(tmp_path, "http://127.0.0.1:9191"):
        assert address_here(environ) == "http://127.0.0.1:9191"
        assert stat.S_IMODE((tmp_path / ADDRESS_FILE).stat().st_mode) == 0o600
        monkeypatch.setenv("THERMOCLINE_DATA_DIR", str(tmp_path))
        assert server_url("") == "http://127.0.0.1:9191"
        assert server_url("localhost:1") == "http://localhost:1"
    assert address_here(environ) == USUAL_ADDRESS and not (tmp_path / ADDRESS_FILE).exists()


def test_another_servers_address_stays(tmp_path: Path):
    with announced(tmp_path, "http://127.0.0.1:1"):
        (tmp_path / ADDRESS_FILE).write_text("http://127.0.0.1:2\n")
    assert address_here({"THERMOCLINE_DATA_DIR": str(tmp_path)}) == "http://127.0.0.1:2"


@pytest.mark.parametrize("content", [b"", b"ftp://x", b"http://x\x1b[0m", b"\xff\xfe", b"x" * 999])
def test_a_file_that_is_no_address_is_ignored(content: bytes, tmp_path: Path):
    (tmp_path / ADDRESS_FILE).write_bytes(content)
    assert address_here({"THERMOCLINE_DATA_DIR": str(tmp_path)}) == USUAL_ADDRESS


def test_a_folder_that_cannot_be_written_keeps_no_server_from_running(tmp_path: Path):
    with announced(tmp_path / "missing", "http://127.0.0.1:1"):
        pass
