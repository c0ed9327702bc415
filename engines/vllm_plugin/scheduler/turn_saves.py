"""Plans the save of a session when its turn ends, and holds its blocks until the ranks have them.

vLLM's blocks are reference counted. A save takes one reference to each of its blocks, so that vLLM
cannot reuse them, and releases it when every rank has copied the rows out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engines.vllm_plugin.plan import Save, WantedBlocks
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks
from kvstore.session import SessionName, SessionRef

MAX_POSTPONED: Final = 1024  # above it the oldest are given up until their next turn


class PostponedSaves:
    """The sessions with a postponed save; they count as being saved. On vLLM's thread."""

    def __init__(self, resident: ResidentSessions, blocks: TokenBlocks) -> None:
        self._resident = resident
        self._blocks = blocks
        self._groups = blocks.groups
        self._sessions: dict[SessionName, SessionRef] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: SessionRef) -> None:
        if session.name not in self._sessions:
            self._resident.count_save(session, +1)
        self._sessions[session.name] = session
        if len(self._sessions) > MAX_POSTPONED:
            self.remove(next(iter(self._sessions.values())))

    def remove(self, session: SessionRef) -> None:
        """Forget the session's postponed save: the save of a newer turn includes all blocks."""
        if self._sessions.pop(session.name, None) is not None:
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
            del block_ids[self._blocks.in_chunks(len(block_ids)) :]
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
        places = range(len(hashes), 0, -self._blocks.chunk_blocks)
        return self._groups.held_states(self._resident.pool, hashes, places)


@dataclass
class HeldSave:
    """A save whose blocks are held until ``num_ranks`` more ranks have copied them out."""

    session: SessionRef | None  # None: a measurement reads them
    block_ids: list[int]
    num_ranks: int
    is_skipped: bool = False  # by one of the ranks


class TurnSaves:
    """The saves of all sessions. All methods run on vLLM's thread."""

    def __init__(self, resident: ResidentSessions, blocks: TokenBlocks, num_ranks: int) -> None:
        self._resident = resident
        self._blocks = blocks
        self._num_ranks = num_ranks
        self._jobs = itertools.count(1)
        self._planned: list[Save] = []
        self._wanted: list[WantedBlocks] = []
        self._held: dict[int, HeldSave] = {}  # by job
        self._postponed = PostponedSaves(resident, blocks)

    def end_turn(
        self,
        request: Any,
        session: SessionRef,
        tables: Sequence[Sequence[int]],
        *,
        filled: bool,
    ) -> None:
        """Plan the save of all full chunks, and record the session's present blocks.

        ``tables``: the request's block ids, by group. ``filled``: the blocks hold the request's own
        KV; otherwise no block is saved.
        """
        block_ids = tables[self._blocks.groups.full]
        hashes = self._blocks.computed_hashes(request, len(block_ids)) if filled else []
        end = self._blocks.in_chunks(len(hashes))
        if end:
            self._postponed.remove(session)
            states = self._held_states(request, hashes[:end])
            ids = self._blocks.computed_ids(request, end)
            job, used = next(self._jobs), list(block_ids[:end])
            self._plan(Save(job, session, hashes[:end], used, states, ids=ids))
        self._resident.end(session, hashes, self._hot_boundary(hashes))

    def _hot_boundary(self, hashes: Sequence[bytes]) -> int | None:
        """The number of blocks before the newest state that vLLM has; None: there are no states."""
        groups = self._blocks.groups
        if not groups.states:
            return None
        places = range(len(hashes), 0, -1)
        return max(groups.held_states(self._resident.pool, hashes, places), default=0)

    def hold_wanted(
        self, request: Any, number: int, block_ids: Sequence[int], boundary: int
    ) -> None:
        """Hold the blocks that a measurement reads.

        ``number``: its order's number. ``boundary``: the number of blocks before the wanted state.
        """
        pool, states = self._resident.pool, self._state_at(request, boundary)
        wanted = WantedBlocks(next(self._jobs), number, list(block_ids), boundary, states)
        held = [*wanted.block_ids, *wanted.state_ids]
        pool.touch([pool.blocks[x] for x in held])
        self._held[wanted.job] = HeldSave(None, held, self._num_ranks)
        self._wanted.append(wanted)

    def _state_at(self, request: Any, boundary: int) -> list[int]:
        """The block ids of the state after ``boundary`` blocks; [] if vLLM no longer has it."""
        groups = self._blocks.groups
        if not groups.states or not boundary:
            return []
        hashes = self._blocks.computed_hashes(request, boundary)
        if len(hashes) < boundary:
            return []
        return groups.held_states(self._resident.pool, hashes, [boundary]).get(boundary, [])

    def pop_wanted(self) -> list[WantedBlocks]:
        """Return the blocks that measurements read in the next step."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def _held_states(self, request: Any, hashes: Sequence[bytes]) -> dict[int, list[int]]:
        groups = self._blocks.groups
        if not groups.states:
            return {}
        prompt = min((request.num_prompt_tokens - 1) // self._blocks.block_tokens, len(hashes))
        places = self._blocks.in_chunks(prompt), self._blocks.chunk_blocks
        return groups.states_to_keep(self._resident.pool, hashes, *places)

    def _plan(self, save: Save) -> None:
        pool, held = self._resident.pool, save.held_ids
        pool.touch([pool.blocks[x] for x in held])
        self._held[save.job] = HeldSave(save.session, held, self._num_ranks)
        self._resident.count_save(save.session, +1)
        self._planned.append(save)

    def acknowledge(self, acks: Mapping[int, int], skipped: Collection[int]) -> None:
        """Release blocks that the ranks no longer need.

        ``acks``: for each job, the number of ranks that are done with its blocks. ``skipped``: the
        jobs among them that a rank did not begin, because too many others waited.
        """
        for job in skipped:
            self._held[job].is_skipped = True
        for job, num_ranks in acks.items():
            self._held[job].num_ranks -= num_ranks
            if self._held[job].num_ranks <= 0:
                self._let_go(self._held.pop(job))

    def _let_go(self, save: HeldSave) -> None:
        if save.session is not None:
            if save.is_skipped:
                self._postponed.add(save.session)
            self._resident.count_save(save.session, -1)
        # Tail first: vLLM reuses the blocks freed first, and a prefix serves more requests.
        pool = self._resident.pool
        pool.free_blocks([pool.blocks[x] for x in reversed(save.block_ids)])

    def pop_planned(self) -> list[Save]:
        """The saves for the next step: for turns that ended since the last, or a postponed one."""
        self._make_up()
        saves, self._planned = self._planned, []
        return saves

    def _make_up(self) -> None:
        """Plan a postponed save, if no other save still holds blocks."""
        if self._held or not self._postponed:
            return
        save = self._postponed.next_save(next(self._jobs))
        if save is not None:
            self._plan(save)
            self._postponed.remove(save.session)

    @property
    def has_work(self) -> bool:
        """True if a save is planned, under way or postponed."""
        return bool(self._held or self._planned or self._wanted or self._postponed)
