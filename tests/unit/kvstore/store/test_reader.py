"""Unpacking a session that comes back, on all threads that there are."""

from __future__ import annotations

import threading

from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    RenamedRam,
    chain_of,
    come_back,
    everything,
    open_store,
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


def test_a_hanging_tier_that_is_asked_in_need_does_not_outlast_the_deadline() -> None:
    """A blob is damaged in memory, and the tier after it hangs: prefill does the rest."""
    fast, slow = ram(), FaultyTier(RenamedRam(1 << 26))
    store = open_store([fast, slow], restore_deadline_s=0.5)
    save(store, ref(), HISTORY)
    damaged = sorted(key for key in everything(fast) if key[:1] == b"c")[0]
    blob = bytearray(everything(fast)[damaged])
    blob[-1] ^= 1
    fast.delete_many([damaged])
    fast.put_many([(damaged, bytes(blob))])
    slow.go_on.clear()
    match = store.match(ref(), chain_of(store, ref(), HISTORY))
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(store.restore(match).num_tokens))
    waiting.start()
    try:
        waiting.join(15)
        assert answers and answers[0] < len(HISTORY)
    finally:
        slow.go_on.set()
        waiting.join(60)
        store.close()
