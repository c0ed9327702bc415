"""Random operations on each tier, against the eviction order alone.

The order decides which blobs a tier keeps (``test_return_order`` tests it for itself). The model is
an order of its own beside a dictionary, that gets the same calls at the same times; equal contents
after every step mean that the tier carries out what its order says: writes, evictions, removals.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvstore.tiers.return_order import ReturnOrder, Update, stated_size
from tests.contract.tier_rig import LOCAL, TierRig, blob_of, key, rig

LENGTHS = (10, 9_000, 14_000)  # often too many for the budget, always some that fit
CAPACITY_BLOBS = 3  # of the largest kind
CHAINS = {0: (0, 1, 2, 3), 1: (0, 1, 4, 5), 2: (6, 7)}
NUM_KEYS = 8

chains = st.sampled_from(list(CHAINS.values()))
one_key = st.integers(0, NUM_KEYS - 1).map(key)
some_keys = st.lists(one_key, min_size=1, max_size=3)


class Model:
    """The order, and the blobs that it says are kept."""

    def __init__(self, costs: dict[int, int], capacity_bytes: int) -> None:
        self.costs = costs
        self.order = ReturnOrder(capacity_bytes, lambda: 0.0, stated_size)
        self.blobs: dict[bytes, bytes] = {}

    def put(self, chain: dict[bytes, bytes], after: bytes) -> int:
        sizes = {name: self.costs[len(blob)] for name, blob in chain.items()}
        self._apply(self.order.add(sizes, "", after), chain)
        return sum(name in self.blobs for name in chain)

    def replace(self, name: bytes, blob: bytes) -> bool:
        update = self.order.replace(name, self.costs[len(blob)])
        self._apply(update, {name: blob})
        return bool(update.added)

    def _apply(self, update: Update, blobs: dict[bytes, bytes]) -> None:
        for gone in update.evicted:
            del self.blobs[gone]
        self.blobs |= {name: blobs[name] for name in update.added}

    def delete(self, names: list[bytes]) -> int:
        count = len({*names} & self.blobs.keys())
        for gone in self.order.remove(names):
            del self.blobs[gone]
        return count


class TierMachine(RuleBasedStateMachine):
    def __init__(self, tiers: TierRig) -> None:
        super().__init__()
        costs = {length: tiers.cost(length) for length in LENGTHS}
        self.model = Model(costs, CAPACITY_BLOBS * costs[LENGTHS[-1]])
        self.tier = tiers.open(self.model.order.capacity_bytes, lambda: 0.0)

    @initialize()
    def fill(self) -> None:
        self.put_many((0, 1, 2), LENGTHS[-1], 0)

    @rule(numbers=chains, length=st.sampled_from(LENGTHS), begin=st.integers(0, 2))
    def put_many(self, numbers: tuple[int, ...], length: int, begin: int) -> None:
        """Write a chain from some place on, with what comes before it held or not."""
        blobs = {key(i): blob_of(i, length) for i in numbers[begin:]}
        after = key(numbers[begin - 1]) if begin else b""
        if after not in self.model.blobs:  # Redis takes it, since another engine may have it
            after, blobs = b"", {key(i): blob_of(i, length) for i in numbers}
        assert self.tier.put_many(list(blobs.items()), "", after) == self.model.put(blobs, after)

    @rule(name=one_key, length=st.sampled_from(LENGTHS), seed=st.integers(100, 200))
    def replace(self, name: bytes, length: int, seed: int) -> None:
        if name in self.model.blobs:
            blob = blob_of(seed, length)
            assert self.tier.replace(name, blob) == self.model.replace(name, blob)

    @rule(numbers=chains, restored=st.booleans())
    def touch(self, numbers: tuple[int, ...], restored: bool) -> None:
        names = [key(i) for i in numbers]
        self.tier.touch(names, restored=restored)
        self.model.order.touch(names, restored=restored)

    @rule(name=one_key, pinned=st.booleans())
    def pin(self, name: bytes, pinned: bool) -> None:
        self.tier.pin(name, pinned)
        self.model.order.pin(name, pinned)

    @rule(names=some_keys)
    def delete(self, names: list[bytes]) -> None:
        assert self.tier.delete_many(names) == self.model.delete(names)
        self.put_many((6, 7), LENGTHS[0], 0)  # what Redis owes goes before the next write

    @invariant()
    def holds_the_same(self) -> None:
        names = [key(i) for i in range(NUM_KEYS)]
        found = self.tier.get_many(names)
        assert not [x for x, y in zip(names, found, strict=True) if y != self.model.blobs.get(x)]
        assert self.tier.contains_many(names) == [name in self.model.blobs for name in names]
        stats = self.tier.stats()
        assert stats.nbytes == self.model.order.nbytes <= stats.capacity_bytes
        assert stats.num_blobs == len(self.model.blobs)

    def teardown(self) -> None:
        self.tier.close()


@pytest.mark.parametrize("kind", LOCAL)
def test_behaves_like_the_model(kind: str, request: pytest.FixtureRequest) -> None:
    with rig(kind, request) as tiers:
        run_state_machine_as_test(
            lambda: TierMachine(tiers),
            settings=settings(
                stateful_step_count=25,
                derandomize=True,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
