"""Random operations on each tier with a budget, against a model that is a list.

The model spells the rules of ``kvstore.tiers.lru`` out in the plainest way; equal contents after
every step mean equal budgets, pins and eviction order.
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

from tests.contract.tier_rig import LOCAL, TierRig, blob_of, key, rig

LENGTHS = (10, 9_000, 14_000)  # often too many for the budget, always some that fit
CAPACITY_BLOBS = 3  # of the largest kind

NUM_KEYS = 7

one_key = st.integers(0, NUM_KEYS - 1).map(key)
some_keys = st.lists(one_key, min_size=2, max_size=4)
items = st.lists(st.tuples(one_key, st.sampled_from(LENGTHS)), min_size=2, max_size=4)


class Model:
    """``order``: keys that may be evicted, least recent first."""

    def __init__(self, costs: dict[int, int], capacity: int) -> None:
        self.costs = costs
        self.capacity = capacity
        self.blobs: dict[bytes, bytes] = {}
        self.order: list[bytes] = []
        self.pins: dict[bytes, int] = {}

    def cost(self, name: bytes) -> int:
        return self.costs[len(self.blobs[name])]

    @property
    def nbytes(self) -> int:
        return sum(self.cost(name) for name in self.blobs)

    def put(self, chain: dict[bytes, bytes]) -> int:
        mine: set[bytes] = set()
        for name, blob in chain.items():
            if name not in self.blobs and not self._make_room(self.costs[len(blob)], mine):
                continue
            self.blobs.setdefault(name, blob)
            mine.add(name)
        self.touch([*mine & chain.keys()], list(chain))
        return len([name for name in chain if name in self.blobs])

    def _make_room(self, cost: int, mine: set[bytes]) -> bool:
        loose = [name for name in self.order if name not in mine]
        fixed = self.nbytes - sum(self.cost(name) for name in loose)
        if fixed + cost > self.capacity:
            return False
        while self.nbytes + cost > self.capacity:
            self.delete([loose.pop(0)])
        return True

    def touch(self, allowed: list[bytes], chain: list[bytes]) -> None:
        for name in reversed(chain):
            if name in allowed and name in self.blobs and not self.pins.get(name):
                self.order = [x for x in self.order if x != name] + [name]

    def replace(self, name: bytes, blob: bytes) -> bool:
        old = self.blobs.get(name)
        self.delete([name])
        if not self._make_room(self.costs[len(blob)], set()):
            if old is not None:
                self.blobs[name] = old
                self.order[:0] = [] if self.pins.get(name) else [name]
            return False
        return self.put({name: blob}) == 1

    def pin(self, names: list[bytes]) -> None:
        for name in names:
            self.pins[name] = self.pins.get(name, 0) + 1
            self.order = [x for x in self.order if x != name]

    def unpin(self, names: list[bytes]) -> None:
        for name in reversed(names):
            if self.pins.get(name):
                self.pins[name] -= 1
                if not self.pins[name] and name in self.blobs:
                    self.order.append(name)

    def delete(self, names: list[bytes]) -> int:
        found = {name for name in names if self.blobs.pop(name, None) is not None}
        self.order = [x for x in self.order if x not in found]
        return len(found)


class TierMachine(RuleBasedStateMachine):
    def __init__(self, tiers: TierRig) -> None:
        super().__init__()
        costs = {length: tiers.cost(length) for length in LENGTHS}
        self.model = Model(costs, CAPACITY_BLOBS * costs[LENGTHS[-1]])
        self.tier = tiers.open(self.model.capacity)

    @initialize()
    def fill(self) -> None:
        self.put_many([(key(i), LENGTHS[-1]) for i in range(CAPACITY_BLOBS)])

    @rule(chain=items)
    def put_many(self, chain: list[tuple[bytes, int]]) -> None:
        blobs = {name: blob_of(name[-1], length) for name, length in chain}
        assert self.tier.put_many(list(blobs.items())) == self.model.put(blobs)

    @rule(name=one_key, length=st.sampled_from(LENGTHS), seed=st.integers(100, 200))
    def replace(self, name: bytes, length: int, seed: int) -> None:
        blob = blob_of(seed, length)
        assert self.tier.replace(name, blob) == self.model.replace(name, blob)

    @rule(names=some_keys)
    def touch(self, names: list[bytes]) -> None:
        self.tier.touch(names)
        self.model.touch(names, names)

    @rule(names=st.lists(one_key, min_size=1, max_size=2))
    def pin(self, names: list[bytes]) -> None:
        self.tier.pin(names)
        self.model.pin(names)

    @rule(names=some_keys)
    def unpin(self, names: list[bytes]) -> None:
        self.tier.unpin(names)
        self.model.unpin(names)

    @rule(names=some_keys)
    def delete(self, names: list[bytes]) -> None:
        assert self.tier.delete_many(names) == self.model.delete(names)

    @invariant()
    def holds_the_same(self) -> None:
        names = [key(i) for i in range(NUM_KEYS)]
        found = self.tier.get_many(names)
        assert not [x for x, y in zip(names, found, strict=True) if y != self.model.blobs.get(x)]
        assert self.tier.contains_many(names) == [name in self.model.blobs for name in names]
        stats = self.tier.stats()
        assert stats.nbytes == self.model.nbytes <= stats.capacity_bytes
        assert stats.num_blobs == len(self.model.blobs)

    def teardown(self) -> None:
        self.tier.close()


@pytest.mark.parametrize("kind", LOCAL)
def test_behaves_like_the_model(kind: str, request: pytest.FixtureRequest) -> None:
    examples = {"ram": 80, "disk": 12}.get(kind, 6)
    with rig(kind, request) as tiers:
        run_state_machine_as_test(
            lambda: TierMachine(tiers),
            settings=settings(
                max_examples=examples,
                stateful_step_count=25,
                deadline=None,
                derandomize=True,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
