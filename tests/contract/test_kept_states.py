"""How many states a session keeps whose cache cannot be cut, and which goes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.blobs.chain import STATE
from kvstore.blobs.state_tree import StateArray
from kvstore.session import STATES_PER_SESSION, SessionRef
from kvstore.store.cold_store import ColdStore
from kvstore.store.states import StateAt
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests.contract import store_rig
from tests.contract.store_rig import MIB, SlowRam, blobs_of, history, ref, resting
from tests.kv_sessions import CHUNK, Rows, chain_of, kv_of, trees_equal

LONG = history(208)
STATE_BYTES = 20_000  # as of real models: more than all chunks of a session here


def state_at(tokens: Sequence[int], position: int) -> StateArray:
    """Something that only these very tokens lead to."""
    seed = np.random.default_rng([position, *tokens[:position]])
    return StateArray("uint8", seed.integers(0, 256, STATE_BYTES, np.uint8))


class StateRig(store_rig.Rig):
    """Stores states at ends of chunks."""

    def open(self, tiers: Sequence[Tier], **more: Any) -> ColdStore:
        return super().open(tiers, needs_state=True, **more)

    def save_with(
        self, store: ColdStore, session: SessionRef, tokens: Sequence[int], states: Sequence[int]
    ) -> None:
        taken = [StateAt(x, state_at(tokens, x)) for x in states]
        source = Rows(store, kv_of(tokens, store.model.layout), taken)
        chain = chain_of(store, session, tokens)
        assert store.save(session, chain, source, states=[x // CHUNK for x in states])
        assert store.flush(200)

    def tokens_back(self, store: ColdStore, session: SessionRef, prompt: Sequence[int]) -> int:
        restored = store.restore(store.match(session, chain_of(store, session, prompt)))
        assert store.flush(200)
        if restored.num_tokens:
            wanted = kv_of(prompt[: restored.num_tokens], store.model.layout)
            for got, want in zip(restored.run, wanted, strict=True):
                assert [x.tobytes() for x in got] == [x.tobytes() for x in want]
            assert trees_equal(restored.state, state_at(prompt, restored.num_tokens))
        return restored.num_tokens


@pytest.fixture
def rig() -> Iterator[StateRig]:
    with ExitStack() as opened:
        yield StateRig(opened)


def num_states(tier: Tier) -> int:
    return sum(name[:1] == STATE for name in blobs_of(tier))


def states_of(store: ColdStore, session_id: str = "s") -> tuple[int, ...]:
    """The positions, in tokens, at which the session's states are."""
    record = store.record(ref(session_id))
    assert record is not None
    return tuple(x * CHUNK for x in record.states)


def test_a_session_keeps_the_newest_state_and_the_one_before_the_answer(
    rig: StateRig, tmp_path: Path
):
    tiers: list[Tier] = [RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)]
    store = rig.open(tiers)
    for n in (48, 80, 128, 160, 208):
        rig.save_with(store, ref(), LONG[:n], [n - 16, n])
        assert [num_states(x) for x in tiers] == [STATES_PER_SESSION] * 2
    assert states_of(store) == (192, 208)
    goes_on = [*LONG, *history(20, 1)]
    without_thoughts = [*LONG[:192], *history(20, 2)]
    long_ago = [*LONG[:100], *history(20, 3)]
    prompts = (goes_on, without_thoughts, long_ago)
    assert [rig.tokens_back(store, ref(), x) for x in prompts] == [208, 192, 0]


def shrunk(tier: RamTier, num_victims: int) -> None:
    """Put the tier under pressure until so many blobs had to go."""
    before = tier.stats()
    filler = b"p" * 100
    for i in range(100_000):
        if tier.stats().evictions >= before.evictions + num_victims:
            return
        tier.put_many([(b"zz%d" % i, filler)])
    raise AssertionError("no pressure")


def test_under_pressure_the_end_goes_first_and_the_older_state_serves(rig: StateRig):
    trial = RamTier(64 * MIB)
    store = rig.open([trial])
    rig.save_with(store, ref(), LONG, [128, 208])
    nbytes = trial.stats().nbytes
    store.close()

    near = RamTier(nbytes + 100)
    store = rig.open([near])
    rig.save_with(store, ref(), LONG, [128, 208])
    shrunk(near, 1)
    assert num_states(near) == 1
    assert rig.tokens_back(store, ref(), [*LONG, *history(20, 1)]) == 128
    assert rig.tokens_back(store, ref(), [*LONG[:160], *history(20, 1)]) == 128


def test_a_session_rests_where_its_newest_state_does(rig: StateRig):
    """A return reads nothing of the slower tier that has the older state."""
    near = RamTier(64 * MIB)
    store = rig.open([near, SlowRam(64 * MIB)])
    rig.save_with(store, ref(), LONG, [128, 208])
    chain = chain_of(store, ref(), LONG)
    near.delete_many([store.keys.state(chain, 128 // CHUNK).key])
    assert num_states(near) == 1
    assert resting(store) == "ram"
    assert rig.tokens_back(store, ref(), LONG) == 208
    near.delete_many([store.keys.state(chain, 208 // CHUNK).key])
    assert resting(store) == "disk"
