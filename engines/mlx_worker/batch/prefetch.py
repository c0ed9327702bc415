"""Makes cold sessions hot before their next turn, when the gateway asks for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from engines.mlx_worker.batch.memory_budget import MemoryBudget
from engines.mlx_worker.batch.prefix_reuse import Post
from engines.mlx_worker.batch.request import PrefillTask
from engines.mlx_worker.sessions.cold_sessions import ColdSessions
from engines.mlx_worker.sessions.hot_cache import HotCache, resolved
from engines.mlx_worker.sessions.hot_sessions import SessionKey
from kvstore.session import SessionRef
from kvstore.store.token_store import Restored

logger = logging.getLogger(__name__)

# Called with the tasks that waited for the prefetch.
Then: TypeAlias = Callable[[list[PrefillTask]], None]


@dataclass
class _Prefetch:
    """One that is under way."""

    joined: list[PrefillTask] = field(default_factory=list)  # turns that wait for it
    forgotten: bool = False  # the session was deleted meanwhile: what comes is not wanted


class Prefetches:
    """All prefetches under way, and the turns that wait for them. Belongs to the owner thread."""

    def __init__(
        self, hot_cache: HotCache, cold: ColdSessions | None, budget: MemoryBudget, post: Post
    ) -> None:
        self._hot_cache = hot_cache
        self._cold = cold
        self._budget = budget
        self._post = post
        self._running: dict[SessionKey, _Prefetch] = {}

    @property
    def joined(self) -> list[PrefillTask]:
        """All tasks that wait for a prefetch."""
        return [task for prefetch in self._running.values() for task in prefetch.joined]

    def begin(self, session: SessionRef, then: Then) -> bool:
        """Start restoring a session, and call ``then`` at the end. False: nothing to do."""
        key = (session.tenant, session.id)
        hot = self._hot_cache.sessions
        if self._cold is None or key in self._running or hot.get(key) or hot.is_busy(key):
            return False
        self._running[key] = _Prefetch()
        self._cold.load(
            session,
            lambda restored: self._post(lambda: self._finish(session, restored, then)),
        )
        return True

    def join(self, task: PrefillTask) -> bool:
        """Let a turn wait for the prefetch of its session. False: there is none."""
        if (key := task.request.key) not in self._running:
            return False
        self._running[key].joined.append(task)
        return True

    def remove(self, task: PrefillTask) -> None:
        """Let go of a task that is not wanted any more."""
        for prefetch in self._running.values():
            if task in prefetch.joined:
                prefetch.joined.remove(task)

    def forget(self, key: SessionKey) -> None:
        """Discard the KV that a prefetch of this session restores."""
        if (prefetch := self._running.get(key)) is not None:
            prefetch.forgotten = True

    def _finish(self, session: SessionRef, restored: Restored | None, then: Then) -> None:
        prefetch = self._running.pop((session.tenant, session.id))
        try:
            if restored is not None and not prefetch.forgotten:
                self._keep(session, restored)
        finally:  # in every case the turns that waited for it go on
            then(prefetch.joined)

    def _keep(self, session: SessionRef, restored: Restored) -> None:
        missing = self._budget.missing() + self._budget.sequence_bytes(restored.num_tokens)
        if self._cold is None or (missing > 0 and not self._hot_cache.make_room(missing, None)):
            return
        try:
            self._hot_cache.keep(
                session,
                restored.tokens,
                self._cold.rebuild(restored),
                saved=resolved(True),
                lossy_tokens=restored.lossy_tokens,
                lossy_state=restored.lossy_state,
            )
        except Exception:  # stored data may be wrong in any way; prefill is right
            logger.exception("a restored session could not be used")
            self._cold.counters["rebuild_failures"] += 1
            return
        self._hot_cache.note_restored(session)
