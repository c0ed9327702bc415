"""Chooses the place for what clients ask to be stored: SQLite in the data folder, or nowhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.stored.shelf import Limits
from gateway.stored.sqlite_shelf import SqliteShelf
from gateway.stored.stored import Stored

FILE = "stored.sqlite"
_DAY_S = 86400.0


def stored_objects(config: GatewayConfig, data_dir: Path) -> Stored:
    """Make the store of responses, conversations and chat completions; nothing is opened yet."""
    if not config.stored_bytes:
        return Stored()
    limits = Limits(config.stored_bytes, config.stored_days * _DAY_S)
    folder = Path(config.stored_path).expanduser() if config.stored_path else data_dir / "stored"
    return Stored(partial(SqliteShelf, folder / FILE, limits))
