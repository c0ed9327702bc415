from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import StoreConfig
from kvstore.errors import TierInUse, TierUnavailable
from kvstore.tiers.disk_budget import capacity_within
from kvstore.tiers.registry import open_tiers, open_usable_tiers

LAZY_URL = "redis://127.0.0.1:1/0"  # no server listens there, and no call waits for one


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (StoreConfig(), ["ram", "disk"]),
        (StoreConfig(redis_url=LAZY_URL), ["ram", "disk", "redis"]),
        (StoreConfig(redis_url=LAZY_URL, ram_bytes=0), ["disk", "redis"]),
        (StoreConfig(ram_bytes=0, disk_bytes=0), []),
    ],
)
def test_opens_enabled_tiers_fastest_first(tmp_path: Path, config: StoreConfig, names: list[str]):
    tiers = open_tiers(config, tmp_path)
    assert [x.name for x in tiers] == names
    for tier in tiers:
        tier.close()


def test_passes_the_budgets_on(tmp_path: Path):
    tiers = open_tiers(StoreConfig(ram_bytes=1 << 20, disk_bytes=1 << 23), tmp_path)
    assert [x.stats().capacity_bytes for x in tiers] == [1 << 20, capacity_within(1 << 23)]
    for tier in tiers:
        tier.close()


def test_the_folder_itself_keeps_its_permissions(tmp_path: Path):
    tmp_path.chmod(0o755)
    (tier,) = open_tiers(StoreConfig(ram_bytes=0), tmp_path)
    tier.close()
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "cold").stat().st_mode & 0o777 == 0o700


def test_a_second_store_in_one_folder_is_refused(tmp_path: Path):
    tiers = open_tiers(StoreConfig(), tmp_path)
    with pytest.raises(TierUnavailable, match="in use by another process"):
        open_tiers(StoreConfig(), tmp_path)
    for tier in tiers:
        tier.close()
    for tier in open_tiers(StoreConfig(), tmp_path):
        tier.close()


def test_a_folder_that_another_engine_has_is_a_mistake_and_no_outage(tmp_path: Path):
    first = open_usable_tiers(StoreConfig(), tmp_path)
    with pytest.raises(TierInUse):
        open_usable_tiers(StoreConfig(), tmp_path)
    for tier in first:
        tier.close()


def test_without_a_usable_folder_the_other_tiers_are_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").touch()
    tiers = open_usable_tiers(StoreConfig(), tmp_path / "file" / "below")
    assert [x.name for x in tiers] == ["ram"]
    assert "not kept on disk" in caplog.text
