"""Limits of a tenant's bytes over the ranks of one engine."""

from __future__ import annotations

from engines.wire import LimitTenants, TenantUses
from kvstore.tenant_bytes import TenantLimits
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
    assert answer.tiers["ram"][tenant].held == sum(held)
    assert all(0 < x <= most // 2 for x in held)
    assert answer.tiers["disk"] == {}


def test_each_rank_only_counts_where_no_more_is_asked(engine: Engine):
    engine.save("s")
    tenant, held = ref("s").tenant, sum(in_ram(engine))
    counted = TenantLimits(others=0, counts_only=True)
    for limits in (counted, TenantLimits({tenant: None}, others=0), counted):
        answer = engine.ask(LimitTenants({"ram": limits}))
        assert isinstance(answer, TenantUses)
        assert sum(in_ram(engine)) == held
    assert answer.tiers["ram"][tenant].held == held
