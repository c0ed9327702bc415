"""Makes the settings of one replica: its private folder, addresses, token and folder on disk.

``LLMConfig`` is the same for all replicas. Each replica makes the settings that differ when it
starts, and writes them to a file that our connector reads in vLLM's processes.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from engines.pool.listed_pool import engine_token
from engines.runtime_folder import runtime_folder
from engines.vllm_plugin.config import PluginSettings, write_settings
from engines.vllm_plugin.process.server import FOLDER_VARIABLE
from kvstore.config import StoreConfig
from kvstore.tiers.seal import read_secret

SETTINGS: Final = "thermocline"  # in kv_connector_extra_config, until a replica starts
PREFIX: Final = "thermocline-ray-"


class ReplicaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that all replicas share, as they are in ``kv_connector_extra_config``.

    ``host``: the address at which replicas listen; "" = their machine's in the cluster.
    """

    store: StoreConfig
    host: str = ""


@dataclass(frozen=True)
class OwnSettings:
    """Settings of one replica."""

    plugin: PluginSettings
    host: str

    @property
    def has_shared_tier(self) -> bool:
        """True if sessions can move to another replica."""
        return bool(self.plugin.store.redis_url)


def own_settings(
    extra: MutableMapping[str, Any], host: str, model: str, number: int, stack: ExitStack
) -> OwnSettings:
    """Make the settings of a replica, write them to a file, and put its path into ``extra``.

    Args:
        extra: the connector's entries, with those of ``ReplicaSettings``.
        host: the address of this machine in the cluster.
        number: the replica's number on this machine, in the name of its folder on disk.
        stack: removes the replica's folder when it is closed.

    Raises:
        ValueError: ``extra`` lacks our entries, or the secret cannot be read.
    """
    given = extra.pop(SETTINGS, None)
    if given is None:
        raise ValueError("this LLMConfig was not made by thermocline.ray.with_sessions")
    common = msgspec.convert(given, ReplicaSettings)
    store, host = common.store, common.host or host
    secret = read_secret(Path(store.secret_file))
    folder = stack.enter_context(runtime_folder(Path(tempfile.gettempdir()), PREFIX))
    disk = str(Path(store.disk_path) / f"ray-{number}") if store.disk_path else str(folder / "cold")
    settings = PluginSettings(
        store=store,
        runtime_dir=str(folder),
        disk_path=disk,
        token=engine_token(secret),
        served_model_name=model,
        control=f"tcp://{host}:{free_port(host)}",
        die_with_parent=True,
        wait_for_front=True,
    )
    extra["settings"] = str(write_settings(settings))
    os.environ[FOLDER_VARIABLE] = str(folder)  # where vLLM's processes write refusals
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)  # else vLLM's sockets remain after a kill
    return OwnSettings(settings, host)


def free_port(host: str) -> int:
    """Return an unused port of this machine."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
