"""Plans the save of a session when its turn ends, and holds its blocks until the ranks have them.

vLLM's blocks are reference counted. A save takes one reference to each of its blocks, so that vLLM
cannot reuse them, and releases it when every rank has copied the rows out. A rank skips a save if
too much waits there already; the session is then saved later, as far as vLLM still has its blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engines.vllm_plugin.plan import Save
from engines.vllm_plugin.scheduler.resident_sessions import ResidentSessions
from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks
from kvstore.session import SessionName, SessionRef

MAX_POSTPONED: Final = 1024  # beyond it, the oldest sessions are not saved until their next turn


@dataclass
class HeldBlocks:
    """Blocks that are held until ``num_ranks`` more ranks have copied them out."""

    session: SessionRef | None  # None: a measurement reads them
    ids: list[int]
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
        self._held: dict[int, HeldBlocks] = {}  # by job
        self._postponed: dict[SessionName, SessionRef] = {}  # the oldest first

    def end_turn(
        self, request: Any, session: SessionRef, tables: Sequence[Sequence[int]], *, filled: bool
    ) -> None:
        """Plan the save of all full chunks, and record the session's present blocks.

        ``tables``: the request's block ids, by group. ``filled``: the blocks hold the request's own
        KV; otherwise no block is saved.
        """
        block_ids = tables[self._blocks.groups.full]
        hashes = self._blocks.computed_hashes(request, len(block_ids)) if filled else []
        end = self._blocks.in_chunks(len(hashes))
        if end:
            self._forget_postponed(session)  # this save includes all of its blocks
            states = self._states_to_keep(request, hashes[:end])
            ids = self._blocks.computed_ids(request, end)
            job, used = next(self._jobs), list(block_ids[:end])
            self._plan(Save(job, session, hashes[:end], used, states, ids=ids))
        is_short = not self._blocks.num_in_chunks(request)
        self._resident.end(session, hashes, too_short=is_short)

    def _states_to_keep(self, request: Any, hashes: Sequence[bytes]) -> dict[int, list[int]]:
        """The newest state at a chunk's end, and the newest within the prompt, by boundary.

        A chat template may change the answer in the next turn's prompt. That turn then continues
        from the second of these states.
        """
        in_prompt = min((request.num_prompt_tokens - 1) // self._blocks.block_tokens, len(hashes))
        return self._newest_state(hashes[:in_prompt]) | self._newest_state(hashes)

    def _newest_state(self, hashes: Sequence[bytes]) -> dict[int, list[int]]:
        """The newest state at a chunk's end that vLLM still has; {} if there is none."""
        end, step = self._blocks.in_chunks(len(hashes)), self._blocks.chunk_blocks
        return self._resident.newest_state(hashes, range(end, 0, -step))

    def _plan(self, save: Save) -> None:
        self._hold(save.job, save.held_ids, save.session)
        self._resident.count_save(save.session, +1)
        self._planned.append(save)

    def hold(self, block_ids: list[int]) -> int:
        """Hold blocks that a measurement reads until every rank has; return the job's number."""
        job = next(self._jobs)
        self._hold(job, block_ids, None)
        return job

    def _hold(self, job: int, block_ids: list[int], session: SessionRef | None) -> None:
        pool = self._resident.pool
        pool.touch([pool.blocks[x] for x in block_ids])
        self._held[job] = HeldBlocks(session, block_ids, self._num_ranks)

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

    def _let_go(self, held: HeldBlocks) -> None:
        if held.session is not None:
            if held.is_skipped:
                self._postpone(held.session)
            self._resident.count_save(held.session, -1)
        # Tail first: vLLM reuses the blocks freed first, and a prefix serves more requests.
        pool = self._resident.pool
        pool.free_blocks([pool.blocks[x] for x in reversed(held.ids)])

    def pop_planned(self) -> list[Save]:
        """The saves for the next step: for turns that ended since the last, or a postponed one."""
        self._plan_postponed()
        saves, self._planned = self._planned, []
        return saves

    @property
    def has_work(self) -> bool:
        """True if a save is planned, under way or postponed."""
        return bool(self._held or self._postponed)

    # ---- saves that a rank has skipped

    def _postpone(self, session: SessionRef) -> None:
        """Save the session later; until then it counts as being saved."""
        if session.name not in self._postponed:
            self._resident.count_save(session, +1)
        self._postponed[session.name] = session
        if len(self._postponed) > MAX_POSTPONED:
            self._forget_postponed(next(iter(self._postponed.values())))

    def _forget_postponed(self, session: SessionRef) -> None:
        if self._postponed.pop(session.name, None) is not None:
            self._resident.count_save(session, -1)

    def _plan_postponed(self) -> None:
        """Plan the save of the oldest session's cached blocks, if no save holds blocks now."""
        while self._postponed and not self._held:
            session = next(iter(self._postponed.values()))
            chain = self._resident.chain(session)
            block_ids = self._resident.cached_ids(chain)
            end = self._blocks.in_chunks(len(block_ids))
            if end:
                hashes, states = chain[:end], self._newest_state(chain[:end])
                job = next(self._jobs)
                self._plan(Save(job, session, hashes, block_ids[:end], states, waits=True))
            # Only after ``_plan``: if the session did not count as being saved in between, it could
            # be deleted then, and the save would bring it back.
            self._forget_postponed(session)
