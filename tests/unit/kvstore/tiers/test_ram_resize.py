"""The budget of the RAM tier changes while it is used."""

from __future__ import annotations

from kvstore.tiers.ram_tier import ENTRY_BYTES, RamTier

EACH = 1 + 1000 + ENTRY_BYTES
KEYS = [bytes([i]) for i in range(8)]


def test_a_smaller_budget_evicts_and_a_larger_one_takes_more():
    tier = RamTier(4 * EACH, guaranteed_share=0.5)
    for key in KEYS:
        tier.put_many([(key, bytes(1000))], "t")
    assert tier.contains_many(KEYS) == [False] * 4 + [True] * 4
    tier.resize(2 * EACH)
    assert tier.contains_many(KEYS) == [False] * 6 + [True] * 2
    stats = tier.stats()
    assert (stats.nbytes, stats.capacity_bytes, stats.evictions) == (2 * EACH, 2 * EACH, 6)
    tier.resize(8 * EACH)
    for key in KEYS:
        tier.put_many([(key, bytes(1000))], "u")
    assert tier.contains_many(KEYS) == [True] * 8
    tier.pin(KEYS[:3])
    tier.resize(EACH)
    assert tier.contains_many(KEYS) == [True] * 3 + [False] * 5  # pins hold, beyond the budget
