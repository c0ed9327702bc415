"""Random lives of a store whose codecs change, with engines that go on from restored rows.

Each row that ever comes back was packed once at most, after any evictions, edits, moves, adoptions
and restarts in between: its wear is that of one codec, or none.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.blobs.chain import RECORD
from kvstore.blobs.packer import StoreCodecs
from kvstore.codecs.base import RawCodec
from kvstore.store.cold_store import ColdStore
from tests.kv_sessions import begin_save, chain_of, disk, kv_of, open_store, ram, ref, tokens
from tests.worn_codec import WornCodec, wear_of

ONCE = [{0}, {1}, {16}]
RAW, FAST, DENSE = RawCodec(), WornCodec("fast.1", 1), WornCodec("dense.1", 16)
ALL = (RAW, FAST, DENSE)
sets = st.sampled_from(
    [StoreCodecs(x, readable=ALL) for x in ALL] + [StoreCodecs(FAST), StoreCodecs(DENSE)]
)
sessions = st.sampled_from([ref("a"), ref("b")])


class Lives(RuleBasedStateMachine):
    @initialize(codecs=sets)
    def start(self, codecs: StoreCodecs) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.histories: dict[str, list[int]] = {}
        self.open(codecs)

    def open(self, codecs: StoreCodecs) -> None:
        self.store: ColdStore = open_store([ram(), disk(Path(self.folder.name))], codecs=codecs)

    @rule(
        session=sessions,
        keep=st.sampled_from([0.5, 0.9, 1.0]),
        more=st.integers(1, 50),
        seed=st.integers(0, 2),
        lost=st.sampled_from([(), (0,), (0, 1)]),
    )
    def take_a_turn(self, session, keep, more, seed, lost):
        """``lost``: tiers that evict all there is while the turn goes on."""
        old = self.histories.get(session.id, [])
        prompt = [*old[: int(len(old) * keep)], *tokens(more, seed)][:150]
        restored = self.wake(session, prompt)
        for place in lost:
            self.evict(place, 1)
        begin_save(self.store, session, prompt, restored)
        assert self.store.flush(200)
        if self.store.record(session) is not None:
            self.histories[session.id] = prompt

    def wake(self, session, prompt):
        match = self.store.match(session, chain_of(self.store, session, prompt))
        restored = self.store.restore(match, deadline_s=20)
        seen = wear_of(restored.run, kv_of(prompt[: restored.num_tokens]))
        assert all(x in ONCE for x in seen)
        # Worn rows are reported as lossy, or they would be packed again.
        assert all(x == {0} for x in seen[restored.lossy_tokens :])
        return restored

    @rule(codecs=sets, keep=st.booleans())
    def adopt(self, codecs, keep):
        self.store.adopt(codecs, keep=keep)

    @rule(codecs=sets)
    def restart(self, codecs):
        self.store.close()
        self.open(codecs)

    @rule(session=sessions)
    def go_to_disk(self, session):
        self.store.demote(session, "disk")

    @rule(place=st.integers(0, 1), every=st.integers(1, 3))
    def lose_some(self, place, every):
        self.evict(place, every)

    def evict(self, place, every):
        names = [x for x, _ in self.store.ledger.stack.scan(place, b"") if x[:1] != RECORD]
        self.store.ledger.stack.tiers[place].delete_many(names[::every])

    @rule(session=sessions)
    def forget(self, session):
        self.store.forget(session)
        self.histories.pop(session.id, None)

    @invariant()
    def every_row_that_comes_back_was_packed_once(self):
        for name, history in getattr(self, "histories", {}).items():
            self.wake(ref(name), [*history, 1])  # checks it

    @invariant()
    def nothing_is_left_without_a_session(self):
        if not getattr(self, "histories", None) and self.store.flush(200):
            assert not any(self.store.ledger.stack.scan(0, b""))
            assert not any(self.store.ledger.stack.scan(1, b""))

    def teardown(self):
        self.store.close()
        self.folder.cleanup()


TestLives = Lives.TestCase
TestLives.settings = settings(stateful_step_count=12)
