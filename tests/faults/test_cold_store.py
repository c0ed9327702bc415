"""Any fault of tiers, blobs or the process costs a recompute at most, never a wrong bit.

``come_back`` compares every restored bit with the KV of the prompt's own prefill, so each
use of it here is the promise under test.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.chain import RECORD
from kvstore.blobs.format import HEADER_BYTES, codec_in
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Tier
from tests.faults.packing_process import THIN
from tests.faults.saving_process import WORN
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import (
    CHUNK,
    begin_save,
    chain_of,
    come_back,
    disk,
    everything,
    kv_of,
    open_store,
    opener,
    ram,
    ref,
    save,
    tokens,
)
from tests.waiting import until
from tests.worn_codec import wear_of

HISTORY = tokens(200)
WHOLE = 192
ROOT = Path(__file__).parents[2]


def faulty_pair() -> tuple[FaultyTier, FaultyTier]:
    return FaultyTier(ram()), FaultyTier(ram(), "disk")


@pytest.fixture
def opened():
    """Opens stores as ``open_store`` does, and closes them at the end."""
    with opener(open_store) as opened:
        yield opened


# ---- fail the k-th call to a tier, for every k


def one_life(store: ColdStore) -> None:
    """All calls of a store, regardless of their results."""
    for session, n in ((ref("a"), 100), (ref("b"), 60), (ref("a"), 150)):
        begin_save(store, session, HISTORY[:n])
        store.flush(10)
        come_back(store, session, HISTORY)
    forked = [*HISTORY[:70], *tokens(30, 3)]
    begin_save(store, ref("a"), forked)
    store.pin(ref("a"), True)
    store.demote(ref("b"), "disk")
    store.tier_of(ref("a")), store.records()
    come_back(store, ref("b"), HISTORY)
    come_back(store, ref("a"), HISTORY)
    come_back(store, None, HISTORY)
    store.forget(ref("b"))
    come_back(store, ref("b"), HISTORY)


def calls_of_one_life(broken: int) -> int:
    tiers = faulty_pair()
    store = open_store(tiers)
    one_life(store)
    store.close()
    return len(tiers[broken].calls)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1], ids=["ram", "disk"])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "from then on"])
def test_the_kth_call_fails(broken, for_good):
    # Calls of different threads may change places between runs, so a few more than were seen.
    # A tier that stays away fails the calls after the k-th as well: every third k has them all.
    for k in range(0, calls_of_one_life(broken) + 5, 3 if for_good else 1):
        tiers = faulty_pair()
        tiers[broken].fails = lambda number, _, k=k: number >= k if for_good else number == k
        store = open_store(tiers)
        one_life(store)
        tiers[broken].fails = lambda number, method: False
        save(store, ref("a"), HISTORY)  # and it goes on as if nothing had been
        assert come_back(store, ref("a"), HISTORY)[1].num_tokens == WHOLE
        store.close()


@pytest.mark.parametrize("needs_state", [False, True])
def test_a_save_that_fails_anywhere_leaves_the_older_session(needs_state):
    def attempt(k: int) -> int:
        tier = FaultyTier(ram())
        store = open_store([tier], needs_state=needs_state)
        save(store, ref(), HISTORY[:100], [96] * needs_state)
        first = len(tier.calls)
        tier.fails = lambda number, method: number == first + k
        longer = HISTORY[:170]
        begin_save(store, ref(), longer, positions=[128, 160] * needs_state)
        store.flush(10)
        tier.fails = lambda number, method: False
        assert come_back(store, ref(), HISTORY)[1].num_tokens >= 96
        store.close()
        return len(tier.calls) - first

    calls = attempt(1 << 30)
    for k in range(calls):
        attempt(k)


def test_a_tier_that_goes_away_in_the_middle_of_a_restore():
    near, far = faulty_pair()
    long = tokens(40 * CHUNK)
    for k in range(8):
        store = open_store([near, far])
        save(store, ref(), long)
        store.demote(ref(), "disk")
        match = store.match(ref(), chain_of(store, ref(), long))
        assert match.num_tokens == len(long)
        seen = len(far.calls)
        far.fails = lambda number, method, at=seen + k: number >= at
        restored = store.restore(match)
        assert restored.num_tokens == min(8 * k, 40) * CHUNK
        assert restored.reason == ("unavailable" if restored.num_tokens < len(long) else None)
        far.fails = lambda number, method: False
        come_back(store, ref(), long)
        store.flush(10)


# ---- damage


def test_a_flipped_bit_anywhere_is_a_miss_and_the_blob_goes(opened):
    tier = ram()
    store = opened([tier])
    save(store, ref(), HISTORY)
    keys = store.ledger.index.blob_keys(store.record(ref()))
    blobs = dict(zip(keys, tier.get_many(keys), strict=True))
    choose = random.Random(7)
    for place in [*range(HEADER_BYTES), *(None for _ in range(300))]:
        which = choose.randrange(len(keys))
        bad = bytearray(blobs[keys[which]])
        bad[choose.randrange(len(bad)) if place is None else place] ^= 1 << choose.randrange(8)
        tier.replace(keys[which], bytes(bad))
        _, restored = come_back(store, ref(), HISTORY)
        assert restored.num_tokens == which * CHUNK
        assert restored.reason == "corrupt"
        assert tier.contains_many([keys[which]]) == [False]
        tier.put_many(list(blobs.items()))  # what continues it went as well
    assert come_back(store, ref(), HISTORY)[1].num_tokens == WHOLE


@pytest.mark.parametrize("kind", [CHUNK_KIND, RECORD])
def test_blobs_cut_at_every_length(kind, opened):
    tier = ram()
    store = opened([tier])
    save(store, ref(), HISTORY[:20])
    (key, good), *_ = tier.scan(kind)
    for length in range(0, len(good), 37):
        tier.replace(key, good[:length])
        store.ledger.index.remove(store.ledger.index.key_of(ref()))
        come_back(store, ref(), HISTORY[:20])
        tier.replace(key, good)
    assert come_back(store, ref(), HISTORY)[1].num_tokens == 16


def test_a_blob_under_another_blobs_name_is_refused(opened):
    tier = ram()
    store = opened([tier])
    theirs = ref("x", tenant="other", salt=b"other")
    save(store, ref(), HISTORY)
    save(store, theirs, HISTORY)  # the same tokens, so the same bytes in all but the key
    mine, other = (store.ledger.index.blob_keys(store.record(x)) for x in (ref(), theirs))
    blobs = dict(zip(mine, tier.get_many(mine), strict=True))
    for a, b in [(mine[2], other[2]), (mine[3], mine[4]), (mine[-1], other[-1])]:
        tier.replace(a, tier.get_many([b])[0])
        _, restored = come_back(store, ref(), HISTORY)
        assert restored.num_tokens == mine.index(a) * CHUNK
        assert restored.reason == "corrupt"
        tier.put_many(list(blobs.items()))


def test_a_record_under_another_sessions_name_is_refused(opened):
    tier = ram()
    store = opened([tier])
    save(store, ref("a"), HISTORY)
    (key, blob) = next(iter(tier.scan(RECORD)))
    stolen = store.ledger.index.key_of(ref("b", tenant="other"))
    tier.put_many([(stolen, blob)])
    theirs = ref("b", tenant="other", salt=b"other")
    assert store.match(theirs, chain_of(store, theirs, HISTORY)).num_tokens == 0
    assert store.record(theirs) is None


def test_what_is_evicted_between_match_and_load_costs_the_rest(opened):
    tier = ram()
    store = opened([tier])
    save(store, ref(), HISTORY)
    match = store.match(ref(), chain_of(store, ref(), HISTORY))
    tier.delete_many([match.reads[5].key, match.reads[9].key])
    restored = store.restore(match)
    assert (restored.num_tokens, restored.reason) == (5 * CHUNK, "evicted")


# ---- time


def test_a_tier_that_hangs_costs_the_deadline_and_no_more(opened):
    """Nor does its late answer touch what was handed out."""
    near, far = faulty_pair()
    store = opened([near, far])
    save(store, ref(), HISTORY)
    keys = store.ledger.index.blob_keys(store.record(ref()))
    near.delete_many(keys[8:])
    far.hang()
    match = store.match(ref(), chain_of(store, ref(), HISTORY))
    start = time.monotonic()
    restored = store.restore(match, deadline_s=0.3)
    assert time.monotonic() - start < 20
    assert (restored.num_tokens, restored.reason) == (8 * CHUNK, "deadline")
    assert restored.run[0][0].shape[1] == restored.num_tokens
    before = [x.tobytes() for pair in restored.run for x in pair]
    far.go_on.set()
    assert store.flush(10)
    assert [x.tobytes() for pair in restored.run for x in pair] == before
    assert come_back(store, ref(), HISTORY)[1].num_tokens == WHOLE


# ---- the process


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("how", "codecs", "passages"), [((), None, 0), (("worn",), WORN, 1)], ids=["raw", "worn"]
)
def test_killed_while_saving(tmp_path, seed, how, codecs, passages, opened):
    """Sessions that were reported safe are there, and hold only rows computed or packed once."""
    safe = run_until_killed(tmp_path, seed, *how)
    store = opened([ram(), disk(tmp_path)], codecs=codecs)
    assert safe and {x.id for x in store.records()} >= safe.keys()
    for record in store.records():
        history = tokens(record.num_tokens, int(record.id))
        assert record.names == chain_of(store, ref(), history)
        restored = store.restore(store.prepare(ref(record.id))[0])
        assert restored.num_tokens >= safe.get(record.id, 0) // CHUNK * CHUNK
        worn = wear_of(restored.run, kv_of(history[: restored.num_tokens]))
        assert worn == [{passages}] * restored.num_tokens
    assert store.stats().counters.get("corrupt", 0) == 0


def run_until_killed(folder: Path, seed: int, *more: str) -> dict[str, int]:
    """The tokens that the process reported safe, by session, before it was killed."""
    command = [sys.executable, "-m", "tests.faults.saving_process", str(folder), str(seed), *more]
    safe: dict[str, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        lines = iter(child.stdout.readline, "")
        for line in itertools.islice(lines, 1 + 12 * seed):
            note(safe, line)
        time.sleep(random.Random(seed).uniform(0, 0.2))
        child.kill()
        for line in lines:
            note(safe, line)
    return safe


@pytest.mark.parametrize("num_lines", [9, 60, 130])
def test_killed_while_packing_again(tmp_path, num_lines, opened):
    """Every session is whole, each blob raw or packed once, and the next life goes on."""
    lengths = {str(i): 200 + 16 * i + i for i in range(8)}
    store = opened([ram(), disk(tmp_path)])
    for name, length in lengths.items():
        save(store, ref(name), tokens(length, int(name)))
    store.close()
    command = [sys.executable, "-m", "tests.faults.packing_process", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        for _ in itertools.islice(iter(child.stdout.readline, ""), num_lines):
            pass
        child.kill()
    far = disk(tmp_path)
    store = opened([ram(), far], codecs=THIN)
    codecs = codecs_of(far)
    assert codecs <= {b"raw.1", b"thin.1"}  # it goes on until the signal comes
    assert b"thin.1" in codecs or num_lines <= 9

    def worn() -> set[int]:
        found: set[int] = set()
        for name, length in lengths.items():
            restored = store.restore(store.prepare(ref(name))[0])
            assert restored.num_tokens == length // CHUNK * CHUNK
            rows = wear_of(restored.run, kv_of(tokens(length, int(name))[: restored.num_tokens]))
            assert all(len(x) == 1 for x in rows)
            found |= set.union(*rows)
        return found

    assert worn() <= {0, 16}
    store.pack_when(lambda: True)
    until(lambda: b"raw.1" not in codecs_of(far))
    store.close()
    store = opened([ram(), disk(tmp_path)], codecs=THIN)
    assert worn() == {16}
    assert store.stats().counters.get("corrupt", 0) == 0


def codecs_of(tier: Tier) -> set[bytes]:
    return {codec_in(x) for name, x in everything(tier).items() if name[:1] == CHUNK_KIND}


def note(safe: dict[str, int], line: str) -> None:
    parts = line.split()
    if len(parts) == 2 and line.endswith("\n"):
        safe[parts[0]] = int(parts[1])


# ---- many at once


def test_saving_restoring_moving_and_forgetting_at_once(tmp_path, opened):
    tiers = [ram(300_000), disk(tmp_path, 2_000_000)]
    store = opened(tiers)
    stop = time.monotonic() + 3
    restored_tokens = 0

    def one_user(number: int) -> None:
        nonlocal restored_tokens
        choose = random.Random(number)
        history = tokens(50, choose.randrange(3))  # users share beginnings
        while time.monotonic() < stop:
            session = ref(str(choose.randrange(4)))
            history = history[: choose.randrange(20, len(history) + 1)]
            history += tokens(choose.randrange(1, 90), choose.randrange(1000))
            history = history[:400]
            act = choose.random()
            if act < 0.4:
                begin_save(store, session, history)
            elif act < 0.85:
                _, restored = come_back(store, session, history)
                restored_tokens += restored.num_tokens
            elif act < 0.9:
                store.demote(session, "disk")
            elif act < 0.95:
                store.pin(session, choose.random() < 0.3)
            else:
                store.forget(session)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one_user, range(6)))
    assert restored_tokens > 1000
    for i in range(4):
        store.pin(ref(str(i)), False)
        store.forget(ref(str(i)))
    assert store.flush(200)
    # Records may be evicted before their chunks; only such orphans may be left.
    assert not any(any(store.ledger.stack.scan(level, RECORD)) for level in (0, 1))
