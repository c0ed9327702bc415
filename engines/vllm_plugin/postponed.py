"""Saves that found the queue full, made up for later.

A save that would have to wait long is not worth the blocks that it holds, so vLLM gets them back at
once. But they stay in its prefix cache until it reuses them, and what is there when the others are
done is saved after all: one session at a time, so that few blocks are held. Until then nothing is
kept but the session's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engines.vllm_plugin.groups import Groups
from engines.vllm_plugin.hot import HotSessions, Name, name_of
from engines.vllm_plugin.plan import Save
from kvstore.records import SessionRef

MAX_POSTPONED: Final = 1024  # beyond it the longest waiting wait for their next turn


class Postponed:
    """On vLLM's thread. A session in here counts as being saved (``HotSessions.is_saving``)."""

    def __init__(self, hot: HotSessions, groups: Groups) -> None:
        self._hot = hot
        self._groups = groups
        self._sessions: dict[Name, SessionRef] = {}  # the longest waiting first

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: SessionRef) -> None:
        if name_of(session) not in self._sessions:
            self._hot.count_save(session, +1)
        self._sessions[name_of(session)] = session
        if len(self._sessions) > MAX_POSTPONED:
            self.remove(next(iter(self._sessions.values())))

    def remove(self, session: SessionRef) -> None:
        """A newer turn of it is saved as a whole; nothing happens if it is not here."""
        if self._sessions.pop(name_of(session), None) is not None:
            self._hot.count_save(session, -1)

    def next_save(self, job: int) -> Save | None:
        """As much of the next session as vLLM still has; None if nothing is left of any.

        The session stays in here until it is removed, once the save is planned: between the two it
        could be deleted, and would come back.
        """
        while self._sessions:
            session = next(iter(self._sessions.values()))
            chain = self._hot.chain(session)
            block_ids = self._cached(chain)
            if block_ids:
                hashes = chain[: len(block_ids)]
                return Save(job, session, hashes, block_ids, self._state(hashes), waits=True)
            self.remove(session)
        return None

    def _cached(self, chain: Sequence[bytes]) -> list[int]:
        """The blocks of the chain, up to the first that vLLM has reused."""
        block_ids: list[int] = []
        for block_hash in chain:
            found = self._hot.pool.get_cached_block(block_hash, [self._groups.full])
            if not found:
                break
            block_ids.append(found[0].block_id)
        return block_ids

    def _state(self, hashes: Sequence[bytes]) -> dict[int, list[int]]:
        if not self._groups.states:
            return {}
        return self._groups.held_states(self._hot.pool, hashes, range(len(hashes), 0, -1))
