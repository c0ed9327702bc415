"""A replica's own settings: made where it starts, and gone when it ends."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from engines.on_ray.own_settings import SETTINGS, ReplicaSettings, own_settings
from engines.pool.listed_pool import engine_token
from engines.vllm_plugin.config import settings_from
from engines.vllm_plugin.process.server import FOLDER_VARIABLE
from kvstore.config import StoreConfig

SECRET = b"s" * 32


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setenv(FOLDER_VARIABLE, "")  # the tested code sets it
    (tmp_path / "secret").write_bytes(SECRET)
    store = StoreConfig(secret_file=str(tmp_path / "secret"), disk_path="/cold")
    return {SETTINGS: msgspec.to_builtins(ReplicaSettings(store=store))}


def test_each_replica_gets_a_folder_an_address_and_the_token_that_gateways_know(entries):
    with ExitStack() as stack:
        one, two = dict(entries), dict(entries)
        settings = [
            own_settings(extra, "127.0.0.1", "model", number, stack).plugin
            for number, extra in enumerate((one, two))
        ]
        for extra, own in zip((one, two), settings, strict=True):
            assert set(extra) == {"settings"} and settings_from(extra) == own
            assert stat.S_IMODE(Path(str(extra["settings"])).stat().st_mode) == 0o600
            assert stat.S_IMODE(Path(own.runtime_dir).stat().st_mode) == 0o700
            assert own.token == engine_token(SECRET)
        assert [x.disk_path for x in settings] == ["/cold/ray-0", "/cold/ray-1"]
        assert len({x.control for x in settings} | {x.runtime_dir for x in settings}) == 4
        assert os.environ[FOLDER_VARIABLE] == settings[1].runtime_dir
    assert not any(Path(x.runtime_dir).exists() for x in settings)


def test_a_configuration_that_was_not_adapted_and_a_secret_that_is_not_there_are_said(entries):
    with ExitStack() as stack:
        with pytest.raises(ValueError, match="with_sessions"):
            own_settings({}, "127.0.0.1", "model", 0, stack)
        Path(entries[SETTINGS]["store"]["secret_file"]).unlink()  # type: ignore[index]
        with pytest.raises(ValueError, match="cannot be read"):
            own_settings(entries, "127.0.0.1", "model", 0, stack)
