from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.config import StoreConfig
from kvstore.errors import TierInUse
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_budget import capacity_within
from kvstore.tiers.registry import open_tiers, open_usable_tiers

LAZY_URL = "redis://127.0.0.1:1/0"  # no server listens there, and no call waits for one
Opened = Callable[..., list[Tier]]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens tiers that are closed at the end."""
    with ExitStack() as stack:

        def open(config: StoreConfig, folder: Path, by: Opened = open_tiers) -> list[Tier]:
            tiers = by(config, folder)
            for tier in tiers:
                stack.callback(tier.close)
            return tiers

        yield open


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (StoreConfig(), ["ram", "disk"]),
        (StoreConfig(redis_url=LAZY_URL), ["ram", "disk", "redis"]),
        (StoreConfig(redis_url=LAZY_URL, ram_bytes=0), ["disk", "redis"]),
        (StoreConfig(ram_bytes=0, disk_bytes=0), []),
    ],
)
def test_opens_enabled_tiers_fastest_first(opened, tmp_path: Path, config, names: list[str]):
    assert [x.name for x in opened(config, tmp_path)] == names


def test_passes_the_budgets_on(opened, tmp_path: Path):
    tiers = opened(StoreConfig(ram_bytes=1 << 20, disk_bytes=1 << 23), tmp_path)
    assert [x.stats().capacity_bytes for x in tiers] == [1 << 20, capacity_within(1 << 23)]


def test_the_folder_itself_keeps_its_permissions(opened, tmp_path: Path):
    tmp_path.chmod(0o755)
    opened(StoreConfig(ram_bytes=0), tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "cold").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("by", [open_tiers, open_usable_tiers])
def test_a_folder_that_another_engine_has_is_a_mistake_and_no_outage(opened, tmp_path: Path, by):
    first = opened(StoreConfig(), tmp_path)
    with pytest.raises(TierInUse, match="in use by another process"):
        by(StoreConfig(), tmp_path)
    for tier in first:
        tier.close()
    opened(StoreConfig(), tmp_path)


def test_without_a_usable_folder_the_other_tiers_are_opened(
    opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    tiers = opened(StoreConfig(), tmp_path / "file" / "below", open_usable_tiers)
    assert [x.name for x in tiers] == ["ram"]
    assert "not kept on disk" in caplog.text
