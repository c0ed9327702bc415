"""Finds the stored blobs of a request, orders the ranks to stage them, and offers them to vLLM.

A request waits here for up to three things, one after the other:

    for room       too much is staged for other requests already (``StagingBudget``)
    for the ranks  they read and verify the blobs; vLLM serves other requests meanwhile
    for a load     vLLM has set blocks aside, and the ranks fill them
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from engines.vllm_plugin.messages import Release, Stage
from engines.vllm_plugin.plan import Load
from engines.vllm_plugin.scheduler.hub import Hub
from engines.vllm_plugin.scheduler.tracked_request import (
    Restore,
    Restoring,
    TokenBlocks,
    TrackedRequest,
)

# A rank answers within its own deadline. After this many seconds more, a request stops waiting.
RANK_GRACE_S: Final = 2.0
# While the model has no work, vLLM runs empty steps until a load or a save is done, in every
# process, on the cores that the load or save needs. So each step waits for news, but no longer than
# this, because vLLM accepts a new request only between two steps.
IDLE_WAIT_S: Final = 0.01


class Restores:
    """The restores of all requests. All methods run on vLLM's thread."""

    def __init__(
        self,
        ranks: Hub,
        blocks: TokenBlocks,
        *,
        deadline_s: float,
        max_staged_bytes: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_staged_bytes`` bounds the packed bytes staged at a time, on all ranks together."""
        self._ranks = ranks
        self._blocks = blocks
        self._deadline_s = deadline_s + RANK_GRACE_S
        self._monotonic = monotonic
        self._budget = StagingBudget(max_staged_bytes)
        self._tickets = itertools.count(1)
        self._silent_at = float("-inf")  # when a rank last missed its deadline
        self._planned: list[Load] = []
        self._loading: dict[str, set[int]] = {}  # block ids by request
        self._has_waited = False  # in this step

    def match(
        self, tracked: TrackedRequest, num_computed_tokens: int, *, idle: bool
    ) -> tuple[int | None, bool]:
        """Answer vLLM's ``get_num_new_matched_tokens``. A second call changes nothing.

        ``idle``: no request is being computed, so a short wait delays no request.
        """
        request = tracked.request
        if tracked.restoring is not Restoring.OPEN or request.skip_reading_prefix_cache:
            return 0, False
        first = num_computed_tokens // self._blocks.block_tokens
        last = self._blocks.num_restorable(request)
        if not last:
            tracked.reason = tracked.why_none
        if first >= last or not self._ranks.ready:
            self.release(tracked)
            return 0, False
        if tracked.restore is not None and first < tracked.restore.first_block:
            self.release(tracked)
        if tracked.waits_since is not None and tracked.waits_since <= self._silent_at:
            tracked.reason = "deadline"  # a rank missed its deadline since the request came
            return self._offer(tracked, first)
        restore = tracked.restore or self._stage(tracked, first, request.block_hashes[:last])
        if restore is None or not self._has_answer(tracked, restore, idle):
            return None, False
        return self._offer(tracked, first)

    def _stage(
        self, tracked: TrackedRequest, first: int, hashes: Sequence[bytes]
    ) -> Restore | None:
        """Ask the ranks to stage these blocks from ``first`` on; None while there is no room."""
        num_tokens = (len(hashes) - first) * self._blocks.block_tokens
        nbytes = num_tokens * self._ranks.packed_bytes_per_token
        if not self._budget.reserve(tracked.request.request_id, nbytes):
            if tracked.waits_since is None:
                tracked.waits_since = self._monotonic()
            return None
        ticket = next(self._tickets)
        tracked.restore, tracked.waits_since = Restore(ticket, first, self._monotonic()), None
        self._ranks.send(Stage(ticket, tracked.session, first, b"".join(map(bytes, hashes))))
        return tracked.restore

    def _has_answer(self, tracked: TrackedRequest, restore: Restore, idle: bool) -> bool:
        """True once the ranks have answered, or the deadline for their answer has passed."""
        if restore.staged is not None:
            return True
        restore.staged = self._ranks.staged(restore.ticket, self._wait_s(idle))
        if restore.staged is not None:
            tracked.note_staged(restore.staged.reason)
            return True
        now = self._monotonic()
        if now - restore.asked_at < self._deadline_s:
            return False
        tracked.reason, self._silent_at = "deadline", now
        return True

    def _wait_s(self, idle: bool) -> float:
        """Seconds to wait for the ranks: once per step at most, however many requests ask in it."""
        patient = idle and not self._has_waited
        self._has_waited = True
        return IDLE_WAIT_S if patient else 0.0

    def _offer(self, tracked: TrackedRequest, first: int) -> tuple[int, bool]:
        staged = tracked.restore.staged if tracked.restore else None
        offered = 0
        if staged is not None:
            offered = max(staged.end_block - first, 0) * self._blocks.block_tokens
        if not offered:
            self.release(tracked)
            tracked.restoring = Restoring.OVER
        return offered, offered > 0

    def release(self, tracked: TrackedRequest) -> None:
        """Release the request's room, and its staged blobs unless they are being loaded."""
        if tracked.restore is not None and not self.is_loading(tracked.request.request_id):
            self._ranks.send(Release(tracked.restore.ticket))
        tracked.restore, tracked.waits_since = None, None
        self._budget.release(tracked.request.request_id)

    def plan_load(
        self, tracked: TrackedRequest, tables: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Plan the load into blocks that vLLM has set aside; ``tables``: block ids by group."""
        request_id = tracked.request.request_id
        if tracked.restore is None or self.is_loading(request_id):
            return
        if not num_external_tokens:
            self.release(tracked)
            return
        restore, staged = tracked.restore, tracked.restore.staged
        assert staged is not None, "vLLM loads only what was offered"
        first = staged.end_block - num_external_tokens // self._blocks.block_tokens
        groups = self._blocks.groups
        ids = list(tables[groups.full][first : staged.end_block])
        state = groups.state_blocks(tables, staged.end_block, first)
        self._planned.append(Load(restore.ticket, request_id, first, ids, state))
        self._loading[request_id] = set(ids)
        tracked.restored_tokens, tracked.tier = num_external_tokens, staged.tier

    def pop_planned(self) -> list[Load]:
        """The loads planned since the last step; allows one wait in the next one."""
        loads, self._planned = self._planned, []
        self._has_waited = False
        return loads

    def failed_loads(self, bad_block_ids: set[int], failed: Collection[str]) -> list[str]:
        """The ids of the loading requests that are among ``failed`` or have a bad block."""
        return [x for x, ids in self._loading.items() if ids & bad_block_ids or x in failed]

    def end_load(self, request_id: str) -> None:
        """Note that the load is over, with any outcome."""
        self._loading.pop(request_id, None)
        self._budget.release(request_id)

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._loading

    @property
    def has_planned(self) -> bool:
        """True if a load waits for the next step."""
        return bool(self._planned)

    @property
    def is_settled(self) -> bool:
        """True if no load is planned or under way; for tests."""
        return not (self._planned or self._loading)


class StagingBudget:
    """Bounds the bytes of blobs that were read, verified and are held until vLLM loads them.

    vLLM calls ``match`` for every waiting request in each step, so without a bound all sessions of
    a long queue would be in memory together, in every worker. One bound is kept here for all ranks:
    if each rank chose for itself, ranks could wait for each other.

    The order is first come, first served: if short sessions could overtake, a long one might never
    find room. A session larger than the whole budget is admitted when no other is staged. vLLM asks
    again for a waiting request in its next step. A request that will not ask again must call
    ``release``; otherwise the others would wait for it. On vLLM's thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[str, None] = {}  # in the order of arrival
        self._reserved: dict[str, int] = {}  # bytes by request

    def reserve(self, request_id: str, nbytes: int) -> bool:
        """Reserve the bytes, or return False and keep the request's place in the queue."""
        self._waiting.setdefault(request_id)
        taken = sum(self._reserved.values())
        fits = not self._reserved or taken + nbytes <= self._max_bytes
        if next(iter(self._waiting)) != request_id or not fits:
            return False
        del self._waiting[request_id]
        self._reserved[request_id] = nbytes
        return True

    def release(self, request_id: str) -> None:
        """Release the request's bytes or its place in the queue, if it has any."""
        self._waiting.pop(request_id, None)
        self._reserved.pop(request_id, None)
