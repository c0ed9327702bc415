"""Serve's router of requests by session: a session stays where it was, unless that is much busier.

It is for calls by handle (verbs on the replica that has the session, batches of one's own). The
gateway asks replicas by their addresses, and chooses in the same way.
"""

from __future__ import annotations

from typing import Any, Final

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engines.fleet.choice import NEAR, Ring, least_behind
from engines.fleet.homes import Homes
from engines.wire import SessionRef

MAX_SESSIONS: Final = 100_000
MOVES_AT: Final = 4


class SessionRouter(RequestRouter):
    """Keeps a session at its home, by ``handle.options(session_id=...)``."""

    def initialize_state(
        self, max_sessions: int = MAX_SESSIONS, moves_at: int = MOVES_AT, **rest: Any
    ) -> None:
        """Set up; Serve passes ``request_router_kwargs``.

        Args:
            moves_at: the requests by which a home has to be ahead for a session to move.
        """
        self._homes = Homes(max_sessions)
        self._moves_at = moves_at
        self._ring: tuple[list[str], Ring] = [], Ring([])

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which Serve is to try them, one at a time."""
        if not candidate_replicas:
            return []
        session = pending_request.metadata.session_id if pending_request is not None else ""
        if pending_request is None or not session:
            return [sorted(candidate_replicas, key=self._load)]
        by_name = {x.replica_id.unique_id: x for x in candidate_replicas}
        names = sorted(by_name)
        if self._ring[0] != names:
            self._ring = names, Ring(names)
        order = [by_name[names[i]] for i in self._ring[1].walk(session)]
        home = by_name.get(self._homes.get(_named(session)) or "")
        if home is not None:
            order = [home, *(x for x in order if x is not home)]
        first = least_behind(order[:NEAR], self._load, self._moves_at)
        pending_request.routing_context.should_backoff = True
        return [[first], *([x] for x in order if x is not first)]

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note the session's home."""
        if session := pending_request.metadata.session_id:
            self._homes.put(_named(session), replica_id.unique_id)


def _named(session: str) -> SessionRef:
    return SessionRef("", session, b"")
