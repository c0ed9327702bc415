"""Unpacking a session that comes back, on all threads that there are."""

from __future__ import annotations

import threading

from tests.contract.store_rig import damage
from tests.faulty_tier import FaultyTier, within
from tests.kv_sessions import (
    RenamedRam,
    chain_of,
    come_back,
    everything,
    ram,
    ref,
    save,
    tokens,
)

HISTORY = tokens(400)


def test_the_thread_that_waits_unpacks_chunks_that_no_codec_thread_has_begun(opened) -> None:
    """With every codec thread busy for as long as the restore takes, it is whole all the same."""
    store = opened([ram()], restore_deadline_s=60.0)
    save(store, ref(), HISTORY)
    done = threading.Event()
    busy = [store.ledger.workers.codec(done.wait, 60) for _ in range(2)]
    try:
        _, restored = come_back(store, ref(), HISTORY)
    finally:
        done.set()
    assert restored.num_tokens == len(HISTORY) and restored.reason is None
    assert all(x.result() for x in busy), "they were busy until the restore was done"


def test_a_hanging_tier_that_is_asked_in_need_does_not_outlast_the_deadline(opened) -> None:
    """A blob is damaged in memory, and the tier after it hangs: prefill does the rest."""
    fast, slow = ram(), FaultyTier(RenamedRam(1 << 26))
    store = opened([fast, slow], restore_deadline_s=0.5)
    save(store, ref(), HISTORY)
    first = min(key for key in everything(fast) if key[:1] == b"c")
    damage(fast, lambda name: name == first)
    slow.hang()
    match = store.match(ref(), chain_of(store, ref(), HISTORY))
    assert within(15, lambda: store.restore(match).num_tokens, slow.go_on) < len(HISTORY)
