"""Random lives of a store, step by step against a model of the saved tokens.

The model knows every token sequence ever saved per tenant; ``come_back`` checks every restored bit.
The store also promises that a session comes back whole if nothing of it was evicted or spoilt.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.blobs.chain import num_common
from kvstore.store.cold_store import ColdStore
from tests.kv_sessions import CHUNK, chain_of, come_back, disk, open_store, ram, ref, save, tokens

sessions = st.sampled_from(
    [ref("a"), ref("b"), ref("a", "other", b"salt"), ref("c", "other", b"salt")]
)
lengths = st.integers(1, 90)
STATES_EVERY = 3 * CHUNK


class Lives(RuleBasedStateMachine):
    @initialize(needs_state=st.booleans())
    def start(self, needs_state: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.needs_state = needs_state
        self.saved: dict[tuple[str, str], list[int]] = {}
        self.intact = True  # nothing was taken away or spoilt
        self.open()

    def open(self) -> None:
        tiers = [ram(), disk(Path(self.folder.name))]
        self.store: ColdStore = open_store(tiers, needs_state=self.needs_state)

    def history(self, session) -> list[int]:
        return self.saved.get((session.tenant, session.id), [])

    @rule(session=sessions, keep=st.floats(0, 1), more=lengths, seed=st.integers(0, 2))
    def take_a_turn(self, session, keep, more, seed):
        old = self.history(session)
        new = [*old[: int(len(old) * keep)], *tokens(more, seed)][:400]
        if len(new) < CHUNK:
            return
        end = len(new) // CHUNK * CHUNK
        positions = [*range(STATES_EVERY, end, STATES_EVERY), end]
        save(self.store, session, new, positions if self.needs_state else ())
        self.saved[session.tenant, session.id] = new

    @rule(session=sessions, keep=st.floats(0, 1), more=lengths, seed=st.integers(0, 2))
    def come_back_with_a_prompt(self, session, keep, more, seed):
        old = self.history(session)
        prompt = [*old[: int(len(old) * keep)], *tokens(more, seed)]
        restored, _ = come_back(self.store, session, prompt)
        if self.intact and old and not self.needs_state:
            one, other = (chain_of(self.store, session, x) for x in (old, prompt))
            assert restored.num_chunks >= num_common(one, other)

    @rule(session=sessions)
    def go_to_disk(self, session):
        where, history = self.store.demote(session, "disk"), self.history(session)
        tenant, name = session.tenant, session.id
        others = [y for x, y in self.saved.items() if x[0] == tenant and x[1] != name]
        shared = bool(history) and any(x[:CHUNK] == history[:CHUNK] for x in others)
        # What another session begins with, too, stays near for it.
        known = where in ("disk", "ram") if shared else where == ("disk" if history else None)
        assert known or not self.intact

    @rule(session=sessions, pinned=st.booleans())
    def pin(self, session, pinned):
        self.store.pin(session, False)  # pinned sessions refuse to be demoted
        if pinned:
            self.store.pin(session, True)
            self.store.pin(session, False)

    @rule(session=sessions)
    def forget(self, session):
        known = self.store.forget(session)
        assert known == bool(self.history(session)) or not self.intact
        self.saved.pop((session.tenant, session.id), None)

    @rule()
    def restart(self):
        self.store.close()
        self.open()

    @precondition(lambda self: self.saved)
    @rule(
        which=st.integers(0, 10**6),
        how=st.sampled_from(["gone", "spoilt"]),
        place=st.integers(0, 1),
    )
    def lose_a_blob(self, which, how, place):
        tier = self.store.ledger.stack.tiers[place]
        blobs = list(tier.scan(b""))
        if blobs:
            key, blob = blobs[which % len(blobs)]
            tier.delete_many([key])
            if how == "spoilt":
                bad = bytearray(blob)
                bad[which % len(bad)] ^= 1
                tier.put_many([(key, bytes(bad))])
            self.intact = False

    @invariant()
    def all_of_it_comes_back(self):
        for (tenant, name), history in self.saved.items():
            session = ref(name, tenant, b"salt" if tenant == "other" else ref().salt)
            match, restored = come_back(self.store, session, [*history, 1])
            if self.intact:
                assert (restored.num_tokens, match.reason) == (len(history) // CHUNK * CHUNK, None)

    @invariant()
    def nothing_else_rests_in_a_tier(self):
        if self.intact and self.store.flush(200):
            named: set[bytes] = set()
            for record in self.store.records():
                index = self.store.ledger.index
                named |= {index.key(record), *index.owned(record)}
            for place in range(2):
                names = {name for name, _ in self.store.ledger.stack.scan(place, b"")}
                assert names <= named

    def teardown(self):
        self.store.close()
        self.folder.cleanup()


TestLives = Lives.TestCase
TestLives.settings = settings(stateful_step_count=12)
