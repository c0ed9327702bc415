"""Settings of the plug-in, as they reach vLLM's processes.

vLLM passes ``kv_connector_extra_config`` to every process. It holds one entry, ``settings``: the
path of a private file, because a command line is public and the settings hold a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvstore.config import StoreConfig

CONTROL_SOCKET = "control.sock"
HUB_SOCKET = "hub.sock"
SETTINGS_FILE = "plugin.json"


class PluginSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine, the same in all of its processes.

    Attributes:
        runtime_dir: the folder (mode 0700) of the sockets.
        disk_path: the folder of the disk tier; each rank has a folder of its own in it.
        token: the secret that the gateway sends first on its control connection.
        control: the address of that connection, ``unix:/path`` or ``tcp://host:port``;
            "" = ``control.sock`` in ``runtime_dir``.
        data_path: the folder of the models' profiles; "" = ``disk_path``.
    """

    store: StoreConfig
    runtime_dir: str
    disk_path: str
    token: str
    served_model_name: str = ""
    control: str = ""
    data_path: str = ""
    # End vLLM's processes with their parent. Set only if they keep the same parent all their life.
    die_with_parent: bool = False
    # The gateway gets no answer until vLLM's HTTP server (with our middleware) accepts requests.
    wait_for_front: bool = False

    @property
    def hub_path(self) -> str:
        return str(Path(self.runtime_dir) / HUB_SOCKET)

    @property
    def data_folder(self) -> Path:
        return Path(self.data_path or self.disk_path)

    @property
    def control_address(self) -> str:
        return self.control or f"unix:{Path(self.runtime_dir) / CONTROL_SOCKET}"


class BadSettings(ValueError):
    """The plug-in's settings are wrong; the message says how to fix them."""


def settings_from(extra: Mapping[str, object]) -> PluginSettings:
    """Read the settings file that ``kv_connector_extra_config`` names.

    Raises ``BadSettings``: none is named, or it cannot be read or decoded.
    """
    path = extra.get("settings")
    if not isinstance(path, str):
        raise BadSettings(
            "kv_connector_extra_config needs the entry 'settings': the path of the plug-in's"
            " settings file (thermocline writes one when it starts vLLM)"
        )
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=PluginSettings)
    except OSError as error:
        raise BadSettings(f"the plug-in's settings {path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise BadSettings(f"the plug-in's settings {path} are not valid: {error}") from error


def write_settings(settings: PluginSettings) -> Path:
    """Write the settings into the runtime folder, readable by this user only; return the path."""
    path = Path(settings.runtime_dir) / SETTINGS_FILE
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(settings))
    return path
