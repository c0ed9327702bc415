"""How many states a session keeps whose cache cannot be cut, and which goes first: both stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.blobs.chain import SNAPSHOT
from kvstore.blobs.state_tree import StateArray
from kvstore.session import STATES_PER_SESSION, SessionRef
from kvstore.store.block_store import BlockStore
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests import block_sessions, kv_sessions
from tests.contract import store_rig
from tests.contract.store_rig import MIB, SALT, SlowRam, blobs_of, history, ref, resting
from tests.kv_sessions import trees_equal

LONG = history(200)
STATE_BYTES = 20_000  # as of real models: more than all chunks of a session here


def state_at(tokens: Sequence[int], position: int) -> StateArray:
    """Something that only these very tokens lead to."""
    seed = np.random.default_rng([position, *tokens[:position]])
    return StateArray("uint8", seed.integers(0, 256, STATE_BYTES, np.uint8))


class TokenRig(store_rig.TokenRig):
    """Stores states at any position."""

    def open(self, tiers: Sequence[Tier], **more: Any) -> ColdStore:
        return super().open(tiers, needs_state=True, **more)

    def save(
        self, store: ColdStore, session: SessionRef, tokens: Sequence[int], states: Sequence[int]
    ) -> None:
        run = kv_sessions.kv_of(tokens, store.layout)
        snapshots = [kv_sessions.Snapshot(x, state_at(tokens, x)) for x in states]
        assert store.save(session, tokens, run, snapshots)
        assert store.flush(20)

    def back(self, store: ColdStore, session: SessionRef, prompt: Sequence[int]) -> int:
        restored = store.load(store.match(session, SALT, prompt, len(prompt)))
        assert store.flush(20)
        if restored.num_tokens:
            wanted = kv_sessions.kv_of(prompt[: restored.num_tokens], store.layout)
            for got, want in zip(restored.run, wanted, strict=True):
                assert [x.tobytes() for x in got] == [x.tobytes() for x in want]
            assert trees_equal(restored.state, state_at(prompt, restored.num_tokens))
        return restored.num_tokens


class BlockRig(store_rig.BlockRig):
    """Stores states after blocks, of four tokens each."""

    def open(self, tiers: Sequence[Tier], **more: Any) -> BlockStore:
        return super().open(tiers, has_state=True, **more)

    def save(
        self, store: BlockStore, session: SessionRef, tokens: Sequence[int], states: Sequence[int]
    ) -> None:
        chain = block_sessions.hashes(tokens)
        boundaries = [x // block_sessions.BLOCK for x in states]
        packer, empty = store.packer, block_sessions.LAYOUT.empty(0)
        fresh = {}
        for x in store.missing(chain, boundaries):
            first = x.end_block * block_sessions.BLOCK
            fresh[x.key] = (
                packer.pack_snapshot(x.key, state_at(tokens, first), empty, first, 0)
                if x.is_state
                else block_sessions.pack(store, chain, x)
            )
        assert store.commit(session, chain, fresh, boundaries)
        assert store.flush(20)

    def back(self, store: BlockStore, session: SessionRef, prompt: Sequence[int]) -> int:
        chain = block_sessions.hashes(prompt)
        fetched = store.fetch(session, chain, 0)
        assert store.flush(20)
        for span, blob in fetched.spans:
            if span.is_state:
                first, empty = span.end_block * block_sessions.BLOCK, block_sessions.LAYOUT.empty(0)
                state = store.packer.unpack_snapshot(blob, span.key, first, 0, empty)
                assert trees_equal(state, state_at(prompt, first))
        return fetched.end_block * block_sessions.BLOCK


StateRig = TokenRig | BlockRig
Store = ColdStore | BlockStore


@pytest.fixture(params=[TokenRig, BlockRig], ids=lambda kind: kind.name)
def rig(request: pytest.FixtureRequest) -> Iterator[StateRig]:
    with ExitStack() as opened:
        yield request.param(opened)


def num_states(tier: Tier) -> int:
    return sum(name[:1] == SNAPSHOT for name in blobs_of(tier))


def states_of(store: Store, session_id: str = "s") -> tuple[int, ...]:
    """The positions, in tokens, at which the session's states are."""
    record = store.record(ref(session_id))
    assert record is not None
    if isinstance(store, ColdStore):
        return record.snapshots
    return tuple(x * block_sessions.BLOCK for x in record.states)


def test_a_session_keeps_the_newest_state_and_the_one_before_the_answer(
    rig: StateRig, tmp_path: Path
):
    tiers: list[Tier] = [RamTier(64 * MIB), DiskTier(tmp_path / "cold", 64 * MIB)]
    store = rig.open(tiers)
    for n in (40, 80, 120, 160, 200):
        rig.save(store, ref(), LONG[:n], [n - 16, n])
        assert [num_states(x) for x in tiers] == [STATES_PER_SESSION] * 2
    assert states_of(store) == (184, 200)
    goes_on = [*LONG, *history(20, 1)]
    without_thoughts = [*LONG[:184], *history(20, 2)]
    long_ago = [*LONG[:100], *history(20, 3)]
    assert [rig.back(store, ref(), x) for x in (goes_on, without_thoughts, long_ago)] == [
        200,
        184,
        0,
    ]


def test_states_of_an_older_release_are_read_and_given_up_at_the_next_save(
    rig: StateRig, tmp_path: Path
):
    before = rig.open([DiskTier(tmp_path / "cold", 64 * MIB)], max_snapshots=4)
    rig.save(before, ref(), LONG[:160], [40, 80, 120, 160])
    before.close()
    disk = DiskTier(tmp_path / "cold", 64 * MIB)
    store = rig.open([disk])
    assert rig.back(store, ref(), [*LONG[:100], *history(20, 1)]) == 80
    assert rig.back(store, ref(), LONG) == 160
    assert num_states(disk) == 4
    rig.save(store, ref(), LONG, [184, 200])
    assert (num_states(disk), states_of(store)) == (2, (184, 200))
    assert rig.back(store, ref(), LONG) == 200


def test_a_turn_without_states_of_its_own_trims_those_of_an_older_release(
    rig: StateRig, tmp_path: Path
):
    before = rig.open([DiskTier(tmp_path / "cold", 64 * MIB)], max_snapshots=4)
    rig.save(before, ref(), LONG[:160], [40, 80, 120, 160])
    before.close()
    store = rig.open([DiskTier(tmp_path / "cold", 64 * MIB)])
    rig.save(store, ref(), LONG, [])
    assert states_of(store) == (120, 160)
    assert rig.back(store, ref(), LONG) == 160


def shrunk(tier: RamTier, num_victims: int) -> None:
    """Put the tier under pressure until so many blobs had to go."""
    before = tier.stats()
    filler = b"p" * 100
    for i in range(100_000):
        if tier.stats().evictions >= before.evictions + num_victims:
            return
        tier.put_many([(b"zz%d" % i, filler)])
    raise AssertionError("no pressure")


def test_under_pressure_the_older_state_goes_first_and_costs_a_usual_return_nothing(rig: StateRig):
    trial = RamTier(64 * MIB)
    store = rig.open([trial])
    rig.save(store, ref(), LONG, [120, 200])
    nbytes = trial.stats().nbytes
    store.close()

    near = RamTier(nbytes + 100)
    store = rig.open([near])
    rig.save(store, ref(), LONG, [120, 200])
    shrunk(near, 1)
    assert num_states(near) == 1
    assert rig.back(store, ref(), [*LONG, *history(20, 1)]) == 200
    assert rig.back(store, ref(), [*LONG[:160], *history(20, 1)]) == 0


def test_a_session_rests_where_its_newest_state_does(rig: StateRig):
    """A return reads nothing of the slower tier that has the older state."""
    near = RamTier(64 * MIB)
    store = rig.open([near, SlowRam(64 * MIB)])
    rig.save(store, ref(), LONG, [120, 200])
    older = [name for name, blob in blobs_of(near).items() if _is_state_at(rig, store, name, 120)]
    assert len(older) == 1
    near.delete_many(older)
    assert resting(store) == "ram"
    assert rig.back(store, ref(), LONG) == 200
    newest = [name for name in blobs_of(near) if name[:1] == SNAPSHOT]
    near.delete_many(newest)
    assert resting(store) == "disk"


def _is_state_at(rig: StateRig, store: Store, name: bytes, position: int) -> bool:
    record = store.record(ref())
    assert record is not None
    if isinstance(store, ColdStore):
        key = store.keys.chain(record).snapshot_key(position)
    else:
        key = store.keys.state(record.block_hashes, position // block_sessions.BLOCK).key
    return name.startswith(key)
