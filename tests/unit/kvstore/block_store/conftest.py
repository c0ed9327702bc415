"""Stores of an engine that has blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.store.block_store import BlockStore
from tests.block_sessions import open_store
from tests.kv_sessions import opener

Opened = Callable[..., BlockStore]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens stores as ``open_store`` does, and closes them at the end."""
    with opener(open_store) as opened:
        yield opened


@pytest.fixture
def store(opened: Opened) -> BlockStore:
    return opened()
