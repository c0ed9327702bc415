"""What the plug-in does at start about a tier or about settings that are wrong; no engine runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from vllm.config import CacheConfig, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from engines.vllm_plugin import connector
from engines.vllm_plugin.config import BadSettings, PluginSettings, write_settings
from engines.vllm_plugin.connector import ThermoclineConnector
from engines.vllm_plugin.groups import DENSE
from engines.vllm_plugin.process.server import FOLDER_VARIABLE, read_refusal
from kvstore.config import StoreConfig
from kvstore.errors import TierInUse

pytestmark = pytest.mark.vllm

STORE = StoreConfig(ram_bytes=1 << 20, disk_bytes=1 << 26)
EMPTY = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])


def engine(extra: dict[str, Any]) -> SimpleNamespace:
    """The fields of ``VllmConfig`` that are read before the cache is there."""
    transfer = KVTransferConfig(
        kv_connector="ThermoclineConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=CacheConfig(block_size=16),
        parallel_config=SimpleNamespace(rank=0, world_size=1),
    )


@pytest.fixture
def worker_side(tmp_path, monkeypatch) -> ThermoclineConnector:
    """Its settings are good; the served model is looked at elsewhere."""
    monkeypatch.setattr(connector, "check", lambda *_: DENSE)
    settings = PluginSettings(
        store=STORE, runtime_dir=str(tmp_path), disk_path=str(tmp_path / "disk"), token="x"
    )
    path = write_settings(settings)
    return ThermoclineConnector(engine({"settings": str(path)}), KVConnectorRole.WORKER, EMPTY)


@pytest.mark.parametrize("given", [True, False])
def test_bad_settings_are_reported_to_the_starter_of_vllm(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    if given:
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    else:
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(BadSettings):
        ThermoclineConnector(
            engine({"settings": str(tmp_path / "none")}), KVConnectorRole.WORKER, EMPTY
        )
    assert ("cannot be read" in read_refusal(tmp_path)) == given


@pytest.mark.parametrize("kind", [ImportError, ValueError, TierInUse])
def test_an_error_that_will_happen_again_is_reported(worker_side, tmp_path, monkeypatch, kind):
    def refuse(*_: Any) -> None:
        raise kind("no such thing")

    monkeypatch.setattr(connector, "open_worker_side", refuse)
    with pytest.raises(kind):
        worker_side.register_kv_caches({})
    assert read_refusal(tmp_path) == "no such thing"


def test_what_may_pass_is_tried_again(worker_side, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(connector, "open_worker_side", fail)
    with pytest.raises(OSError, match="too many"):
        worker_side.register_kv_caches({})
    assert read_refusal(tmp_path) == ""


def test_a_reset_that_drops_nothing_is_not_said_to_be_done(worker_side, caplog):
    """vLLM resets the connector's cache after weights were replaced."""
    assert worker_side.reset_cache() is False
    assert "not dropped" in caplog.text
