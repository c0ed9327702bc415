"""What each tenant is guaranteed of every tier, through the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.ledger.notices import StoreNotice
from kvstore.session import TierName
from kvstore.tenant_bytes import TenantLimits, TenantUse
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from kvstore.tiers.tenant_parts import ACTIVE_S
from tests.contract.store_rig import LONG, MIB, Rig, history, ref
from tests.waiting import until

QUIET, GREEDY = ref("q", "quiet"), [ref(f"g{i}", "greedy") for i in range(12)]
SHARE = 0.5


def opens(kind: str, folder: Path) -> Callable[[int, float], Tier]:
    def open_tier(capacity_bytes: int, share: float) -> Tier:
        if kind == "disk":
            return DiskTier(folder, capacity_bytes, share)
        return RamTier(capacity_bytes, share)

    return open_tier


def taken(rig: Rig, open_tier: Callable[[int, float], Tier]) -> int:
    """What the quiet tenant's session takes of a tier."""
    tier = open_tier(64 * MIB, 0.0)
    store = rig.open([tier])
    rig.save(store, QUIET, LONG)
    nbytes = tier.stats().nbytes
    store.forget(QUIET)
    store.close()
    return nbytes


def flooded(rig: Rig, tiers: Sequence[Tier]) -> int:
    """Tokens that the quiet tenant finds after the other has written ten sessions more."""
    store = rig.open(tiers)
    rig.save(store, QUIET, LONG)
    for number, session in enumerate(GREEDY):
        rig.save(store, session, history(100, 50 + number))
    back = rig.back(store, QUIET, LONG).num_tokens
    newest = rig.back(store, GREEDY[-1], history(100, 50 + len(GREEDY) - 1)).num_tokens
    assert newest == 96  # the newest session is not evicted
    store.close()
    return back


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_session_within_its_part_survives_another_tenants_flood(
    rig: Rig, kind: str, tmp_path: Path
):
    open_tier = opens(kind, tmp_path / "cold")
    capacity = 5 * taken(rig, open_tier)
    assert flooded(rig, [open_tier(capacity, 0.0)]) < 96
    with ExitStack() as stack:
        if kind == "disk":
            open_tier = opens(kind, tmp_path / "other")
        tier = open_tier(capacity, SHARE)
        stack.callback(tier.close)
        assert flooded(rig, [tier]) == 96


@pytest.mark.parametrize("away_s", [0.0, ACTIVE_S - 600.0, ACTIVE_S + 600.0])
def test_it_survives_it_after_a_restart(rig: Rig, tmp_path: Path, away_s: float):
    def disk(share: float) -> Tier:
        return DiskTier(tmp_path / "cold", capacity, share)

    capacity = 5 * taken(rig, opens("disk", tmp_path / "measured"))
    store = rig.open([disk(SHARE)])
    rig.save(store, QUIET, LONG)
    store.close()
    store = rig.open([disk(SHARE)], clock=lambda: time.time() + away_s)
    for number, session in enumerate(GREEDY):
        rig.save(store, session, history(100, 50 + number))
    # Who was away for longer than a day has no part any more.
    assert (rig.back(store, QUIET, LONG).num_tokens == 96) == (away_s < ACTIVE_S)
    store.close()


@pytest.mark.parametrize("share", [0.0, SHARE])
def test_sessions_of_a_tenant_above_its_part_are_reported(rig: Rig, tmp_path: Path, share: float):
    capacity = 5 * taken(rig, opens("ram", tmp_path))
    store = rig.open([RamTier(capacity, share), DiskTier(tmp_path / "cold", 64 * MIB)])
    notices: list[StoreNotice] = []
    store.listen(notices.append)
    rig.save(store, QUIET, LONG)
    for number, session in enumerate(GREEDY):
        rig.save(store, session, history(100, 50 + number))
        store.expire()
    causes = {x.session.tenant: x.why for x in notices}
    assert causes == ({"greedy": "share"} if share else {"greedy": "budget", "quiet": "budget"})
    assert not any(x.is_gone for x in notices)
    store.close()


def test_sessions_that_no_tier_has_any_more_are_reported(rig: Rig, tmp_path: Path):
    capacity = 5 * taken(rig, opens("ram", tmp_path))
    store = rig.open([RamTier(capacity, SHARE)])
    notices: list[StoreNotice] = []
    store.listen(notices.append)
    rig.save(store, QUIET, LONG)
    for number, session in enumerate(GREEDY):
        rig.save(store, session, history(100, 50 + number))
    for _ in range(2):  # a missing session is looked for twice
        store.expire()
    assert notices and {(x.session.tenant, x.why, x.is_gone) for x in notices} == {
        ("greedy", "share", True)
    }
    store.close()


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_tenant_beyond_its_limit_loses_its_own_oldest_sessions(
    rig: Rig, kind: str, tmp_path: Path
):
    of_one = taken(rig, opens(kind, tmp_path / "cold"))
    store = rig.open([opens(kind, tmp_path / "other")(64 * MIB, SHARE)])
    notices: list[StoreNotice] = []
    store.listen(notices.append)
    name: TierName = kind  # type: ignore[assignment]
    limits = {name: TenantLimits({"greedy": 4 * of_one})}
    until(lambda: store.limit_tenants(limits) == {name: {}}, every_s=0.1)
    rig.save(store, QUIET, LONG)
    for number, session in enumerate(GREEDY):
        rig.save(store, session, history(100, 50 + number))
        assert store.limit_tenants(limits)[name]["greedy"].held <= 4 * of_one
    for _ in range(2):  # a missing session is looked for twice
        store.expire()
    assert {(x.session.tenant, x.why) for x in notices} == {("greedy", "limit")}
    back = [rig.back(store, x, history(100, 50 + i)).num_tokens == 96 for i, x in enumerate(GREEDY)]
    assert back[-1] and not back[0] and 2 <= sum(back) <= 5
    assert rig.back(store, QUIET, LONG).num_tokens == 96
    limits[name] = TenantLimits({"greedy": 0})
    assert not store.limit_tenants(limits)[name].get("greedy", TenantUse(0)).held
    rig.save(store, GREEDY[0], history(100, 50))  # kept nowhere, and no failure
    assert rig.back(store, GREEDY[0], history(100, 50)).num_tokens == 0
    assert rig.back(store, QUIET, LONG).num_tokens == 96
    store.close()
