"""Limits of a tenant's bytes over the ranks of one engine."""

from __future__ import annotations

from engines.wire import LimitTenants, TenantUses
from kvstore.session import TenantLimits
from tests.block_sessions import ref
from tests.unit.engines.vllm_plugin.hub_engine import Engine


def in_ram(engine: Engine) -> list[int]:
    tiers = [store.ledger.stats(0).tiers for store in engine.stores]
    return [tier.nbytes for x in tiers for tier in x if tier.name == "ram"]


def test_a_limit_is_divided_among_the_ranks_and_its_use_added_up(engine: Engine):
    for i in range(3):
        engine.save(f"s{i}")
    tenant = ref("s").tenant
    most = sum(in_ram(engine)) // 2
    answer = engine.ask(LimitTenants({"ram": TenantLimits({tenant: most}), "disk": TenantLimits()}))
    assert isinstance(answer, TenantUses)
    held = in_ram(engine)
    assert answer.tiers["ram"][tenant] == sum(held)
    assert all(0 < x <= most // 2 for x in held)
    assert answer.tiers["disk"] == {}
