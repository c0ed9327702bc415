from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.sessions.cold_sessions import ColdSessions, HotSession
from engines.mlx_worker.sessions.hot_sessions import HotCache, HotSessions, common_prefix, resolved
from kvstore.session import SessionRef
from kvstore.store.states import StateAt

pytestmark = pytest.mark.mlx

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def filled(num_tokens: int, window: int | None = None) -> Caches:
    cache = KVCache() if window is None else RotatingKVCache(window)
    values = mx.arange(num_tokens, dtype=mx.float32).reshape(1, 1, num_tokens, 1)
    cache.update_and_fetch(values, values)
    return [cache]


def hot(
    name: str, tokens: list[int], tenant: str = "t", caches: Caches | None = None
) -> HotSession:
    saved: Future[bool] = Future()
    saved.set_result(True)
    ref = SessionRef(tenant, name, tenant.encode())
    kept = filled(len(tokens)) if caches is None else caches
    ids = np.array(tokens, np.int32)
    return HotSession(ref, kept, len(tokens), ids, nbytes=100, saved=saved)


@given(TOKENS, TOKENS)
def test_the_common_prefix_is_the_same_as_in_python(one: list[int], other: list[int]) -> None:
    expected = len(os.path.commonprefix([one, other]))
    assert common_prefix(np.array(one, np.int32), np.array(other, np.int32)) == expected


def test_its_own_session_is_preferred_and_a_longer_prefix_wins() -> None:
    sessions = HotSessions(itertools.count(1.0).__next__)
    base = list(range(100))
    for x in (hot("one", base[:60]), hot("two", base[:60] + [7]), hot("three", base[:90])):
        sessions.put(x)
    prompt = np.arange(100, dtype=np.int32)
    best = sessions.best_prefix(SessionRef("t", "one", b"t"), prompt, 99)
    assert (best.session.ref.id, best.num_tokens) == ("three", 90)
    sessions.take(("t", "three"))
    best = sessions.best_prefix(SessionRef("t", "one", b"t"), prompt, 99)
    assert best.own and best.num_tokens == 60
    too_little = prompt[:20]  # it is not worth it
    assert sessions.best_prefix(SessionRef("t", "new", b"t"), too_little, 19) is None
    assert sessions.best_prefix(SessionRef("u", "one", b"u"), prompt, 99) is None


def test_a_session_is_never_offered_to_another_salt() -> None:
    sessions = HotSessions(itertools.count(1.0).__next__)
    sessions.put(hot("one", list(range(60))))
    prompt = np.arange(80, dtype=np.int32)
    assert sessions.best_prefix(SessionRef("t", "one", b"other"), prompt, 79) is None


def test_victims_come_in_order() -> None:
    sessions = HotSessions(itertools.count(1.0).__next__)
    for name in ("pinned", "old", "saving", "new"):
        sessions.put(hot(name, [1]))
    sessions.pin(("t", "pinned"), True)
    saving = sessions.get(("t", "saving"))
    saving.saved = Future()
    assert [x.ref.id for x in sessions.victims()] == ["old", "new", "saving", "pinned"]


def test_a_session_is_busy_while_any_of_its_turns_runs() -> None:
    sessions, key = HotSessions(itertools.count(1.0).__next__), ("t", "one")
    sessions.begin_turn(key, 10)
    sessions.begin_turn(key, 30)
    assert sessions.busy_tokens(key) == 30 and sessions.busy() == [key]
    sessions.end_turn(key, 30)
    assert sessions.is_busy(key)
    sessions.end_turn(key, 10)
    assert not sessions.is_busy(key) and sessions.busy() == []


IDS = np.arange(8, dtype=np.int32)


class Full:
    """A store whose queue is always full."""

    def __init__(self) -> None:
        self.num_asked = 0

    def save(
        self, hot: HotSession, states: Sequence[StateAt], then: Callable[[bool], None]
    ) -> None:
        self.num_asked += 1
        hot.saved = resolved(False)


def kept(hot_cache: HotCache, name: str) -> HotSession:
    cache = KVCache()
    values = mx.zeros((1, 1, len(IDS), 4))
    cache.update_and_fetch(values, values)
    hot = HotSession(SessionRef("t", name, b"salt"), [cache], len(IDS), IDS)
    hot_cache.keep(hot)
    return hot


def test_sessions_that_could_not_be_saved_leave_nothing_behind() -> None:
    store, causes = Full(), list[str]()
    hot_cache = HotCache(
        HotSessions(lambda: 0.0),
        cast(ColdSessions, store),
        lambda cause, session: causes.append(cause),
        lambda: None,
    )
    for number in range(5):
        hot = kept(hot_cache, f"s{number}")
        hot_cache.sessions.pin(hot.key, True)
        assert not hot_cache.make_room(1, None)  # it is asked once more first
        if number:
            assert hot_cache.make_room(1, None)
        else:
            hot_cache.forget(hot.key)
    assert store.num_asked == 2 * 5
    assert causes == ["lost"] * 4
    assert not hot_cache.sessions.known


def test_a_pin_outlives_a_drop_while_a_turn_or_a_save_is_under_way() -> None:
    hot_cache = HotCache(HotSessions(lambda: 0.0), None, lambda cause, session: None, lambda: None)
    busy, saving = kept(hot_cache, "busy"), kept(hot_cache, "saving")
    hot_cache.sessions.begin_turn(busy.key, 9)
    saving.saved = type(saving.saved)()
    for hot in (busy, saving):
        hot_cache.sessions.pin(hot.key, True)
        hot_cache.drop(hot)
        assert hot_cache.sessions.is_pinned(hot.key)


def test_kv_of_another_length_than_its_tokens_is_never_kept() -> None:
    hot_cache = HotCache(HotSessions(lambda: 0.0), None, lambda cause, session: None, lambda: None)
    cache = KVCache()
    values = mx.zeros((1, 1, len(IDS) + 1, 4))
    cache.update_and_fetch(values, values)
    hot_cache.keep(HotSession(SessionRef("t", "s", b"salt"), [cache], len(IDS), IDS))
    assert hot_cache.counters["keep_failures"] == 1
    assert hot_cache.sessions.all() == []


def test_a_prompt_takes_its_own_hot_session_out_and_leaves_anothers() -> None:
    """Its KV is written to from then on, and must be offered to no other prompt."""
    hot_cache = HotCache(HotSessions(lambda: 0.0), None, lambda cause, session: None, lambda: None)
    hot_cache.sessions.put(hot("one", list(range(60))))
    for name, is_left in (("two", True), ("one", False)):
        ref, prompt = SessionRef("t", name, b"t"), np.arange(80, dtype=np.int32)
        found = hot_cache.take_prefix(ref, prompt, 79)
        assert found is not None and found.num_tokens == 60
        assert (hot_cache.sessions.get(("t", "one")) is not None) == is_left
