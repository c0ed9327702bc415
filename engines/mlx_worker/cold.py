"""The owner thread's side of the cold store.

Looking for a prompt's KV and unpacking it happen on a few threads of this module's own, before the
prompt enters a batch, so running rows never wait for a disk. The owner thread only turns the
finished arrays into caches. Whatever goes wrong on the way costs a prefill and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from engines.mlx_worker import parking
from engines.mlx_worker.hot import HotSession
from engines.mlx_worker.layout import CachePlan
from engines.mlx_worker.turn import Caches
from kvstore.codecs.packed_array import PackedLayout
from kvstore.records import MissReason, SessionRecord, SessionRef, TierName
from kvstore.snapshot import Snapshot
from kvstore.store import ColdStore, Match, Restored

logger = logging.getLogger(__name__)

# Restores that may run at once; each holds a whole session's KV in flight.
NUM_RESTORES = 4


@dataclass(frozen=True)
class Question:
    """What the cold store is asked for at the start of a turn."""

    session: SessionRef
    tokens: np.ndarray  # int32, (num_tokens,)
    limit: int  # at most so many tokens are of use
    boundaries: Sequence[int]
    at_least: int  # fewer tokens than this are not worth a restore


@dataclass(frozen=True)
class Found:
    """The answer; ``restored`` is None for a miss."""

    restored: Restored | None
    reason: MissReason | None

    @property
    def num_tokens(self) -> int:
        return self.restored.num_tokens if self.restored else 0

    @property
    def tier(self) -> TierName | None:
        return self.restored.tier if self.restored else None


# What a prefetch brings.
Woken: TypeAlias = Restored | None


class Cold:
    """``save`` and ``rebuild`` are the owner thread's; ``ask`` and ``wake`` return at once and
    answer on a thread of the pool."""

    def __init__(self, store: ColdStore, model: Any, plan: CachePlan) -> None:
        self.store = store
        self._model = model
        self._plan = plan
        self._pool = ThreadPoolExecutor(NUM_RESTORES, "mlx-restore")

    def ask(self, question: Question, then: Callable[[Found], None]) -> None:
        self._pool.submit(self._answer, question, then)

    def wake(self, session: SessionRef, then: Callable[[Woken], None]) -> None:
        """Everything that is kept of a session, without a prompt."""
        self._pool.submit(self._wake, session, then)

    def save(
        self, hot: HotSession, snapshots: Sequence[Snapshot], then: Callable[[bool], None]
    ) -> None:
        """Start copying the session into the store; resolves ``hot.saved``, then calls ``then``.

        Raises whatever mlx or the store do; ``hot.saved`` is then as it was.
        """
        saved: Future[bool] = Future()

        def done(record: SessionRecord | None) -> None:
            saved.set_result(record is not None)
            then(record is not None)

        num_tokens = len(hot.tokens)
        if self._plan.needs_state:
            snapshots = [*snapshots, Snapshot(num_tokens, parking.state_tree(hot.caches))]
        run = parking.growing_run(hot.caches, num_tokens)
        # Rows of a packed cache are the codec's own bytes: to save them packs nothing again.
        packed = isinstance(self._plan.layout, PackedLayout)
        lossy_tokens = 0 if packed else hot.lossy_tokens
        if not self.store.save(
            hot.session, hot.tokens, run, snapshots, done, lossy_tokens=lossy_tokens
        ):
            saved.set_result(False)
        # Last: what raises above leaves no promise that nobody would keep.
        hot.saved = saved

    def rebuild(self, restored: Restored) -> Caches:
        """Raises ``Mismatch``, or what mlx raises."""
        return parking.rebuild(
            self._model, self._plan.layout, restored.run, restored.state, restored.num_tokens
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    # ---- threads of the pool

    def _answer(self, question: Question, then: Callable[[Found], None]) -> None:
        try:
            found = self._look(question)
        except Exception:  # the edge of this thread: a store that fails is a store without KV
            logger.exception("the cold store could not be read")
            found = Found(None, "unavailable")
        then(found)

    def _wake(self, session: SessionRef, then: Callable[[Woken], None]) -> None:
        woken = None
        try:
            woken = self._load(self.store.prepare(session), at_least=1).restored
        except Exception:  # as in _answer
            logger.exception("the cold store could not be read")
        then(woken)

    def _look(self, question: Question) -> Found:
        match = self.store.match(
            question.session,
            question.session.salt,
            question.tokens,
            question.limit,
            question.boundaries,
        )
        return self._load(match, question.at_least)

    def _load(self, match: Match, at_least: int) -> Found:
        if match.num_tokens < at_least:
            return Found(None, match.reason)
        restored = self.store.load(match)
        reason = restored.reason or match.reason
        return Found(restored if restored.num_tokens >= at_least else None, reason)
