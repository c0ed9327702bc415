"""A tier that keeps no blobs evicts as the one does that keeps them."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.ram_tier import RamTier
from launch.simulation.sized_tier import SizedBlob, SizedTier

KEYS = [b"c%d" % i for i in range(12)] + [b"r1", b"r2"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "replace", "touch", "delete", "pin", "unpin"]),
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
        st.integers(0, 1500),
    ),
    max_size=40,
)


def step(tier: RamTier | SizedTier, action: str, keys: list[bytes], nbytes: int) -> object:
    sized = isinstance(tier, SizedTier)
    blob = SizedBlob(nbytes) if sized else bytes(nbytes)
    match action:
        case "put":
            return tier.put_many([(x, blob) for x in keys], "t")
        case "replace":
            return tier.replace(keys[0], blob, "t")
        case "touch":
            return tier.touch(keys)
        case "delete":
            return tier.delete_many(keys)
        case "pin":
            return tier.pin(keys)
    return tier.unpin(keys)


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_both_hold_the_same_keys_and_lengths(steps):
    real, sized = RamTier(6000), SizedTier("ram", 6000, time.monotonic)
    for action, keys, nbytes in steps:
        assert step(real, action, keys, nbytes) == step(sized, action, keys, nbytes)
        assert real.contains_many(KEYS) == sized.contains_many(KEYS)
        assert real.lengths(KEYS) == sized.lengths(KEYS)
    assert (real.stats().nbytes, real.stats().num_blobs) == (
        sized.stats().nbytes,
        sized.stats().num_blobs,
    )
