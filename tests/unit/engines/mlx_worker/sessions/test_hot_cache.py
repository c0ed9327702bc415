"""Nothing is remembered of sessions that are dropped for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from engines.mlx_worker.sessions.cold_sessions import ColdSessions, HotSession
from engines.mlx_worker.sessions.hot_sessions import HotCache, HotSessions, resolved
from kvstore.session import SessionRef
from kvstore.store.states import StateAt

pytestmark = pytest.mark.mlx

TOKENS = np.arange(8, dtype=np.int32)


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
    values = mx.zeros((1, 1, len(TOKENS), 4))
    cache.update_and_fetch(values, values)
    hot = HotSession(SessionRef("t", name, b"salt"), [cache], len(TOKENS), TOKENS)
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
    values = mx.zeros((1, 1, len(TOKENS) + 1, 4))
    cache.update_and_fetch(values, values)
    hot_cache.keep(HotSession(SessionRef("t", "s", b"salt"), [cache], len(TOKENS), TOKENS))
    assert hot_cache.counters["keep_failures"] == 1
    assert hot_cache.sessions.all() == []
