"""Remembers the sessions whose save was skipped, and saves them when there is time.

A save that would have to wait long is not worth the blocks that it holds, so vLLM gets the blocks
back immediately. They stay in its prefix cache until it reuses them. When all other saves are done,
the blocks that are still cached are saved: one session at a time, so that few blocks are held.
Until then only the session's name is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.plan import Save
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions, SessionName, name_of
from kvstore.session import SessionRef

MAX_POSTPONED: Final = 1024  # above it the oldest are given up until their next turn


class PostponedSaves:
    """The sessions with a postponed save; they count as being saved. On vLLM's thread."""

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
        """Forget the session's postponed save: the save of a newer turn includes all blocks."""
        if self._sessions.pop(name_of(session), None) is not None:
            self._resident.count_save(session, -1)

    def next_save(self, job: int) -> Save | None:
        """A save of the cached blocks of the oldest session; None if vLLM has no session's blocks.

        The session stays here until the caller removes it, after it has planned the save.
        Otherwise the session would not count as being saved in between, and if it were deleted
        then, the save would bring it back.
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
        """The ids of the chain's blocks, up to the first one that vLLM has reused."""
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
