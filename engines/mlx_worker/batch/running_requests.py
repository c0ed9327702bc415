"""Follows requests from their arrival to their last event, and keeps their KV at the end.

At its end a turn's KV stays as an idle hot session and is saved, whether the turn ran to its end
or was cancelled half-way: KV that was computed is not wasted.
"""

from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import Future

import numpy as np

from engines.host.fair_shares import FairShares
from engines.mlx_worker.batch.request import Request, Sequence
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.event_queue import EventBuffer
from engines.mlx_worker.generation import Event, Failed, Finished, FinishReason
from engines.mlx_worker.sessions.hot_cache import HotCache, Notify
from engines.mlx_worker.sessions.hot_sessions import SessionKey

logger = logging.getLogger(__name__)


class RunningRequests:
    """All requests that have not had their last event. Belongs to the owner thread.

    A sequence is in a batch or on its way there, but in the midst of a step it may be in neither;
    a caller that must miss none asks here.
    """

    def __init__(
        self, hot_cache: HotCache, events: EventBuffer, notify: Notify, shares: FairShares
    ) -> None:
        self._hot_cache = hot_cache
        self._events = events
        self._notify = notify
        self._shares = shares
        self._requests: dict[Request, None] = {}
        self.counters: Counter[str] = Counter()

    def all(self) -> list[Request]:
        return list(self._requests)

    def begin(self, request: Request) -> None:
        """Take a request in; its session is busy from now on."""
        self.counters["turns"] += 1
        self._requests[request] = None
        self._shares.come(request.tenant, request.generation.weight)
        if key := request.key:
            self._hot_cache.sessions.begin_turn(key, len(request.generation.prompt))

    def send(self, request: Request, event: Event) -> None:
        """Have the client informed, at the end of this round."""
        self._events.put(request.events, event)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        caches: Caches,
        num_cached: int,
        unchanged: Future[bool] | None = None,
    ) -> None:
        """End one sequence and keep its KV; with the last one the request is over.

        Args:
            caches: its KV, given away; empty if it has none of its own.
            num_cached: how many of its tokens ``caches`` hold.
            unchanged: of KV that is as it was saved before; see ``HotCache.keep``.
        """
        sequence.request.sequences.remove(sequence)
        self.send(sequence.request, Finished(sequence.index, reason))
        self._events.flush()  # the client need not wait while KV is kept
        self.keep(sequence, caches, num_cached, unchanged)
        if not sequence.request.sequences:
            self._end(sequence.request)

    def keep(
        self,
        sequence: Sequence,
        caches: Caches,
        num_cached: int,
        unchanged: Future[bool] | None = None,
    ) -> None:
        """Make the first sequence's KV the session's; of the others nothing is kept."""
        request, session = sequence.request, sequence.request.generation.session
        if session is None or sequence.index or request.forgotten or not caches or not num_cached:
            return
        tokens = np.array(sequence.tokens[:num_cached], np.int32)
        snapshots, lossy = request.snapshots, (request.lossy_tokens, request.lossy_state)
        try:
            self._hot_cache.keep(session, tokens, caches, snapshots, unchanged, *lossy)
        except Exception:  # mlx, a defect: the answer is out, and its KV can be computed again
            logger.exception("the KV of a turn could not be kept")
            self._hot_cache.counters["keep_failures"] += 1
        request.snapshots = []

    def fail(self, request: Request, error: Exception) -> None:
        """End the whole request and keep nothing of it."""
        self.counters["failed_turns"] += 1
        request.sequences.clear()
        self.send(request, Failed(f"{type(error).__name__}: {error}"))
        self._end(request)

    def forget(self, key: SessionKey) -> None:
        """Keep nothing of the requests that run for this session."""
        for request in self._requests:
            request.forgotten = request.forgotten or request.key == key

    def _end(self, request: Request) -> None:
        del self._requests[request]
        self._shares.leave(request.tenant)
        request.snapshots = []
        if (key := request.key) and (session := request.generation.session):
            self._hot_cache.sessions.end_turn(key, len(request.generation.prompt))
            if not request.forgotten:
                self._notify("turn", session)
