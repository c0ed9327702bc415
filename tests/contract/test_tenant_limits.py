"""A tenant's limit of bytes in a tier, and why sessions left, through the store."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvstore.ledger.notices import StoreNotice
from kvstore.session import TenantLimits, TierName
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.contract.store_rig import LONG, MIB, Rig, history, ref, session_bytes
from tests.waiting import until

QUIET, GREEDY = ref("q", "quiet"), [ref(f"g{i}", "greedy") for i in range(12)]


def opens(kind: str, folder: Path) -> Callable[[int], Tier]:
    return partial(DiskTier, folder) if kind == "disk" else RamTier


@pytest.mark.parametrize("has_disk", [False, True])
def test_sessions_that_left_a_tier_are_reported(rig: Rig, tmp_path: Path, has_disk: bool):
    capacity = 5 * session_bytes(rig, session=QUIET)
    disk = [DiskTier(tmp_path / "cold", 64 * MIB)] if has_disk else []
    store = rig.open([RamTier(capacity), *disk])
    notices: list[StoreNotice] = []
    store.listen(notices.append)
    for number, session in enumerate(GREEDY):
        rig.save(store, session, history(100, 50 + number))
        store.expire()
    for _ in range(2):  # a missing session is looked for twice
        store.expire()
    causes = {(x.session.tenant, x.why, x.is_gone) for x in notices}
    assert causes == {("greedy", "budget", not has_disk)}
    store.close()


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_a_tenant_beyond_its_limit_loses_its_own_oldest_sessions(rig, kind, tmp_path):
    of_one = session_bytes(rig, opens(kind, tmp_path / "cold"), QUIET)
    store = rig.open([opens(kind, tmp_path / "other")(64 * MIB)])
    notices: list[StoreNotice] = []
    store.listen(notices.append)
    name: TierName = kind  # type: ignore[assignment]
    limits = {name: TenantLimits({"greedy": 4 * of_one})}
    until(lambda: store.limit_tenants(limits) == {name: {}}, every_s=0.1)
    rig.save(store, QUIET, LONG)
    for number, session in enumerate(GREEDY):
        rig.save(store, session, history(100, 50 + number))
        assert store.limit_tenants(limits)[name]["greedy"] <= 4 * of_one
    for _ in range(2):  # a missing session is looked for twice
        store.expire()
    assert {(x.session.tenant, x.why) for x in notices} == {("greedy", "limit")}
    back = [rig.back(store, x, history(100, 50 + i)).num_tokens == 96 for i, x in enumerate(GREEDY)]
    assert back[-1] and not back[0] and 2 <= sum(back) <= 5
    assert rig.back(store, QUIET, LONG).num_tokens == 96
    limits[name] = TenantLimits({"greedy": 0})
    assert not store.limit_tenants(limits)[name].get("greedy")
    rig.save(store, GREEDY[0], history(100, 50))  # kept nowhere, and no failure
    assert rig.back(store, GREEDY[0], history(100, 50)).num_tokens == 0
    assert rig.back(store, QUIET, LONG).num_tokens == 96
    store.close()
