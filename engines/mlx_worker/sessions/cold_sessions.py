"""The owner thread's side of the cold store.

Looking for a prompt's KV and unpacking it happen on a few threads of this module's own, before the
prompt enters a batch, so running sequences never wait for a disk. The owner thread only turns the
finished arrays into caches. Any error on the way costs a prefill and nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import CachePlan, Caches
from engines.mlx_worker.sessions.hot_sessions import HotSession
from kvstore.blobs.snapshot import Snapshot
from kvstore.codecs.rows.packed_layout import PackedLayout
from kvstore.session import MissReason, SessionRef, TierName
from kvstore.store.records import SessionRecord
from kvstore.store.token_store import ColdStore, Match, Restored

logger = logging.getLogger(__name__)

# Restores that may run at once; each holds a whole session's KV in flight.
NUM_RESTORES = 4


@dataclass(frozen=True)
class PrefixQuery:
    """A prompt at the start of its turn, for which the cold store may have KV."""

    session: SessionRef
    tokens: np.ndarray  # int32, (num_tokens,)
    limit: int  # at most so many tokens are of use
    boundaries: Sequence[int]  # positions where snapshots may lie
    at_least: int  # fewer tokens than this are not worth a restore


@dataclass(frozen=True)
class ColdPrefix:
    """The cold store's answer; ``restored`` is None for a miss."""

    restored: Restored | None
    reason: MissReason | None

    @property
    def num_tokens(self) -> int:
        return self.restored.num_tokens if self.restored else 0

    @property
    def tier(self) -> TierName | None:
        return self.restored.tier if self.restored else None


class ColdSessions:
    """Saves hot sessions into the store and brings cold ones back.

    ``save`` and ``rebuild`` are the owner thread's; ``find`` and ``load`` return at once and call
    back on a thread of the pool.
    """

    def __init__(self, store: ColdStore, model: Any, plan: CachePlan) -> None:
        self.store = store
        self._model = model
        self._plan = plan
        self._pool = ThreadPoolExecutor(NUM_RESTORES, "mlx-restore")
        self.counters: Counter[str] = Counter()  # the owner thread's

    def find(self, query: PrefixQuery, then: Callable[[ColdPrefix], None]) -> None:
        """Look for a prompt's longest prefix and unpack it, then call ``then``."""
        self._pool.submit(self._find, query, then)

    def load(self, session: SessionRef, then: Callable[[Restored | None], None]) -> None:
        """Unpack everything that is kept of a session, then call ``then``; None = nothing."""
        self._pool.submit(self._load_session, session, then)

    def save(
        self, hot: HotSession, snapshots: Sequence[Snapshot], then: Callable[[bool], None]
    ) -> None:
        """Start copying the session into the store; resolves ``hot.saved``, then calls ``then``.

        Raises all that mlx or the store raise; ``hot.saved`` is then as it was.
        """
        saved: Future[bool] = Future()

        def done(record: SessionRecord | None) -> None:
            saved.set_result(record is not None)
            then(record is not None)

        num_tokens = len(hot.tokens)
        if self._plan.needs_state:
            snapshots = [*snapshots, Snapshot(num_tokens, kv_arrays.state_tree(hot.caches))]
        run = kv_arrays.growing_run(hot.caches, num_tokens)
        # Rows of a packed cache are the codec's own bytes: to save them packs nothing again.
        packed = isinstance(self._plan.layout, PackedLayout)
        lossy_tokens = 0 if packed else hot.lossy_tokens
        if not self.store.save(
            hot.ref,
            hot.tokens,
            run,
            snapshots,
            done,
            lossy_tokens=lossy_tokens,
            lossy_state=hot.lossy_state,
        ):
            saved.set_result(False)
        # Last: what raises above leaves no promise that would not be kept.
        hot.saved = saved

    def rebuild(self, restored: Restored) -> Caches:
        """Make caches of the KV that the store has restored.

        Raises ``Mismatch`` for KV of another model, or an error of mlx.
        """
        return kv_arrays.rebuild(
            self._model, self._plan.layout, restored.run, restored.state, restored.num_tokens
        )

    def close(self) -> None:
        """End the threads; look-ups that have not begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    # ---- threads of the pool

    def _find(self, query: PrefixQuery, then: Callable[[ColdPrefix], None]) -> None:
        try:
            found = self._look_up(query)
        except Exception:  # the edge of this thread: a store that fails is a store without KV
            logger.exception("the cold store could not be read")
            found = ColdPrefix(None, "unavailable")
        then(found)

    def _load_session(self, session: SessionRef, then: Callable[[Restored | None], None]) -> None:
        restored = None
        try:
            restored = self._restore(self.store.prepare(session), at_least=1).restored
        except Exception:  # as in _find
            logger.exception("the cold store could not be read")
        then(restored)

    def _look_up(self, query: PrefixQuery) -> ColdPrefix:
        match = self.store.match(
            query.session, query.session.salt, query.tokens, query.limit, query.boundaries
        )
        return self._restore(match, query.at_least)

    def _restore(self, match: Match, at_least: int) -> ColdPrefix:
        if match.num_tokens < at_least:
            return ColdPrefix(None, match.reason)
        restored = self.store.load(match)
        reason = restored.reason or match.reason
        return ColdPrefix(restored if restored.num_tokens >= at_least else None, reason)
