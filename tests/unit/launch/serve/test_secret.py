from __future__ import annotations

import os
import stat

import pytest

from launch.errors import LaunchError
from launch.serve.secret import NUM_BYTES, server_secret


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


def test_one_that_others_can_read_is_refused(tmp_path):
    server_secret(tmp_path)
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(LaunchError, match="chmod 600"):
        server_secret(tmp_path)


def test_one_that_was_cut_short_is_refused(tmp_path):
    server_secret(tmp_path)
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(LaunchError, match="damaged; remove it"):
        server_secret(tmp_path)


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LaunchError, match="--data-dir"):
        server_secret(tmp_path / "file" / "data")
