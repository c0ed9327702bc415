"""Remembers the sessions whose save was skipped, and saves them when there is time.

A save that would have to wait long is not worth the blocks that it holds, so vLLM gets them back at
once. But they stay in its prefix cache until it reuses them. When all other saves are done, the
blocks that are still there are saved after all: one session at a time, so that few blocks are held.
Until then nothing is kept but the session's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.plan import Save
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions, SessionName, name_of
from kvstore.session import SessionRef

MAX_POSTPONED: Final = 1024  # beyond it the oldest are given up until their next turn


class PostponedSaves:
    """The sessions that are still to be saved; they count as being saved. On vLLM's thread."""

    def __init__(self, resident: ResidentSessions, groups: Groups) -> None:
        self._resident = resident
        self._groups = groups
        self._sessions: dict[SessionName, SessionRef] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: SessionRef) -> None:
        if name_of(session) not in self._sessions:
            self._resident.count_save(session, +1)
        self._sessions[name_of(session)] = session
        if len(self._sessions) > MAX_POSTPONED:
            self.remove(next(iter(self._sessions.values())))

    def remove(self, session: SessionRef) -> None:
        """Forget the session if it is here: a newer turn of it is saved as a whole."""
        if self._sessions.pop(name_of(session), None) is not None:
            self._resident.count_save(session, -1)

    def next_save(self, job: int) -> Save | None:
        """A save of what vLLM still has of the oldest session; None if nothing is left of any.

        The session stays in here until the caller removes it, once the save is planned. Otherwise
        it would not count as being saved in between, and a session deleted then would come back.
        """
        while self._sessions:
            session = next(iter(self._sessions.values()))
            chain = self._resident.chain(session)
            block_ids = self._cached(chain)
            if block_ids:
                hashes = chain[: len(block_ids)]
                return Save(job, session, hashes, block_ids, self._state(hashes), waits=True)
            self.remove(session)
        return None

    def _cached(self, chain: Sequence[bytes]) -> list[int]:
        """Ids of the blocks of the chain, up to the first one that vLLM has reused."""
        block_ids: list[int] = []
        for block_hash in chain:
            found = self._resident.pool.get_cached_block(block_hash, [self._groups.full])
            if not found:
                break
            block_ids.append(found[0].block_id)
        return block_ids

    def _state(self, hashes: Sequence[bytes]) -> dict[int, list[int]]:
        if not self._groups.states:
            return {}
        return self._groups.held_states(self._resident.pool, hashes, range(len(hashes), 0, -1))
