"""Keys of sessions are hashed once."""

from __future__ import annotations

from kvstore.chain import KeySpace
from kvstore.session_keys import KeyMaker
from tests.kv_sessions import (
    CHUNK,
    ref,
    save,
    tokens,
)

HISTORY = tokens(200)


class CountingSpace(KeySpace):
    num_chains = 0

    def chain(self, root, tokens):
        self.num_chains += 1
        return super().chain(root, tokens)


def test_keys_are_not_hashed_again_for_every_look(store):
    save(store, ref(), HISTORY)
    record = store.record(ref())
    keys = KeyMaker(CountingSpace("f1", CHUNK, "model"), growing=True, needs_state=False)
    assert len(keys.listed(record)) == 13
    assert keys.listed(record) == keys.listed(record)
    assert keys.space.num_chains == 1


def test_another_session_or_history_has_other_keys(store):
    save(store, ref(), HISTORY)
    before = store.record(ref())
    save(store, ref(), [*HISTORY[:150], 1, 2])
    after = store.record(ref())
    listed = store._keys.listed
    assert listed(before) == store._keys.of(before).in_order(CHUNK) != listed(after)
    assert listed(after) == store._keys.of(after).in_order(CHUNK)
