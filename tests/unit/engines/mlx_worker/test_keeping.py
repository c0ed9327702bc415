"""What is remembered of sessions that are dropped for good: nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from engines.mlx_worker.cold import Cold
from engines.mlx_worker.hot import HotSession, HotSessions
from engines.mlx_worker.keeping import Keeper, resolved
from kvstore.errors import Mismatch
from kvstore.records import SessionRef
from kvstore.snapshot import Snapshot

pytestmark = pytest.mark.mlx

TOKENS = np.arange(8, dtype=np.int32)


class Full:
    """A store whose queue is always full."""

    def __init__(self) -> None:
        self.num_asked = 0

    def save(
        self, hot: HotSession, snapshots: Sequence[Snapshot], then: Callable[[bool], None]
    ) -> None:
        self.num_asked += 1
        hot.saved = resolved(False)


def kept(keeper: Keeper, name: str) -> HotSession:
    cache = KVCache()
    values = mx.zeros((1, 1, len(TOKENS), 4))
    cache.update_and_fetch(values, values)
    return keeper.keep(SessionRef("t", name, b"salt"), TOKENS, [cache])


def test_sessions_that_could_not_be_saved_leave_nothing_behind() -> None:
    store, told = Full(), list[str]()
    keeper = Keeper(
        HotSessions(lambda: 0.0),
        cast(Cold, store),
        lambda cause, session: told.append(cause),
        lambda: None,
    )
    for number in range(5):
        hot = kept(keeper, f"s{number}")
        keeper.hot.pin(hot.key, True)
        assert not keeper.make_room(1, None)  # it is asked once more first
        if number:
            assert keeper.make_room(1, None)
        else:
            keeper.forget(hot.key)
    assert store.num_asked == 2 * 5
    assert told == ["lost"] * 4
    assert not keeper._tried_twice
    assert not keeper.hot._pinned


def test_a_pin_outlives_a_drop_while_a_turn_or_a_save_is_under_way() -> None:
    keeper = Keeper(HotSessions(lambda: 0.0), None, lambda cause, session: None, lambda: None)
    busy, saving = kept(keeper, "busy"), kept(keeper, "saving")
    keeper.hot.begin_turn(busy.key, 9)
    saving.saved = type(saving.saved)()
    for hot in (busy, saving):
        keeper.hot.pin(hot.key, True)
        keeper.drop(hot)
        assert keeper.hot.is_pinned(hot.key)


def test_kv_of_another_length_than_its_tokens_is_never_kept() -> None:
    keeper = Keeper(HotSessions(lambda: 0.0), None, lambda cause, session: None, lambda: None)
    cache = KVCache()
    values = mx.zeros((1, 1, len(TOKENS) + 1, 4))
    cache.update_and_fetch(values, values)
    with pytest.raises(Mismatch, match="caches of 8 tokens hold"):
        keeper.keep(SessionRef("t", "s", b"salt"), TOKENS, [cache])
    assert keeper.hot.all() == []
