"""Where a rank has its sessions, as real stores hold them."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.vllm_plugin.inventory import event_note, read_event_note
from engines.vllm_plugin.messages import RankRests
from engines.vllm_plugin.worker.resting_watch import SWEEP_S, RestingWatch
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests import block_sessions
from tests.block_sessions import (
    BLOCK,
    PER_CHUNK,
    chain_of,
    hashes,
    open_store,
    ref,
    rows_of,
    tokens_of,
)
from tests.kv_sessions import Rows, StateAt

TOKENS = tokens_of(24)
CHAIN = hashes(TOKENS)  # twelve chunks
ALL = 24


def ids_of(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def note_of(tokens: Sequence[int]) -> bytes:
    return event_note(hashes(tokens), ids_of(tokens), PER_CHUNK)


def save(store: ColdStore, session: block_sessions.SessionRef, tokens: Sequence[int]) -> None:
    block_sessions.save(store, session, hashes(tokens), note_of(tokens))


class Rank:
    def __init__(self, folder: Path, ram_bytes: int = 1 << 26, **options: Any) -> None:
        self.now = [0.0]
        self.news: list[RankRests] = []
        self.store = open_store([RamTier(ram_bytes), DiskTier(folder, 1 << 26)], **options)
        self.watch = RestingWatch(self.store, BLOCK, self.news.append, lambda: self.now[0])

    def look(self) -> list[RankRests]:
        self.now[0] += 2 * SWEEP_S
        self.watch.look()
        return self.take()

    def take(self) -> list[RankRests]:
        news, self.news[:] = list(self.news), []
        return news


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.store.close()


def where(news: list[RankRests]) -> list[tuple]:
    return [(x.session.id, x.ram, x.storage) for x in news]


def test_a_save_is_reported_at_once_and_the_disk_when_it_has_it(rank):
    save(rank.store, ref(), TOKENS)
    rank.watch.look_at(ref())
    (first, *more) = rank.take()
    assert (first.ram, first.hashes) == (ALL, b"".join(CHAIN))
    assert rank.store.flush(200)
    assert where([first, *more, *rank.look()])[-1] == ("s", ALL, ALL)
    rank.watch.look_at(ref())
    rank.take()
    assert rank.look() == []


def test_verbs_are_reported(rank):
    save(rank.store, ref(), TOKENS)
    assert rank.store.flush(200)
    rank.look()
    rank.take()
    rank.store.demote(ref(), "disk")
    rank.watch.look_at(ref())
    assert where(rank.take()) == [("s", 0, ALL)]
    rank.store.forget(ref())
    rank.watch.look_at(ref())
    assert where(rank.take()) == [("s", 0, 0)]
    assert rank.look() == []


def test_evictions_are_found_by_looking_through_all_sessions(tmp_path):
    rank = Rank(tmp_path, ram_bytes=2_000_000)  # room for two sessions and a half
    chains = {f"s{i}": tokens_of(24, first=i * 1000) for i in range(4)}
    for name, tokens in chains.items():
        save(rank.store, ref(name), tokens)
        assert rank.store.flush(200)
        rank.watch.look_at(ref(name))
    reports: dict[str, RankRests] = {x.session.id: x for x in rank.take() + rank.look()}
    for name, news in reports.items():
        pieces = rank.store.keys.chunks(chain_of(rank.store, hashes(chains[name])))
        held = rank.store.ledger.stack.holds(0, [x.key for x in pieces])
        assert news.ram == PER_CHUNK * held.count(True), "a chain is evicted from its end"
        assert news.storage == ALL
    assert reports["s0"].ram != ALL
    rank.store.close()


def test_after_a_restart_the_inventory_is_reported_with_its_tokens(tmp_path):
    rank = Rank(tmp_path)
    save(rank.store, ref(), TOKENS)
    rank.store.close()
    again = Rank(tmp_path)
    (news,) = again.look()
    assert (news.ram, news.storage) == (0, ALL)
    assert (news.hashes, news.ids) == (b"".join(CHAIN), ids_of(TOKENS))
    assert again.look() == []
    again.watch.start_over()
    assert {x.session.id for x in again.look()} == {"s"}
    again.store.close()


def test_of_an_edited_session_the_new_blocks_are_reported(rank):
    save(rank.store, ref(), TOKENS)
    edited = [*TOKENS[: 9 * BLOCK], *tokens_of(5, first=9000)]
    save(rank.store, ref(), edited)
    rank.watch.look_at(ref())
    news = rank.take()[-1]
    assert (news.hashes, news.ids) == (b"".join(hashes(edited)), ids_of(edited))
    assert news.ram == 14


@pytest.mark.parametrize("states", [(), (5,), (5, 9)])
def test_of_a_model_with_states_blocks_count_up_to_a_stored_state(tmp_path, states):
    rank = Rank(tmp_path, needs_state=True)
    taken = [StateAt(x * PER_CHUNK * BLOCK, [x]) for x in states]
    rows = Rows(rank.store, rows_of(CHAIN, 0, 24), taken)
    chain = chain_of(rank.store, CHAIN)
    assert rank.store.save(ref(), chain, rows, states=states, note=note_of(TOKENS))
    assert rank.store.wait_saved(ref())
    rank.watch.look_at(ref())
    (news, *_) = rank.take()
    assert news.ram == (PER_CHUNK * states[-1] if states else 0)
    rank.store.close()


def test_without_kv_events_there_is_no_note(rank):
    assert event_note(CHAIN, b"", PER_CHUNK) == b""
    assert read_event_note(b"", 12, PER_CHUNK) == ([], b"")
    block_sessions.save(rank.store, ref(), CHAIN)
    rank.watch.look_at(ref())
    assert rank.take() == []
