"""Lets a prompt wait for a beginning that another prompt of its tenant is being prefilled with.

The prompt that is fed is the *leader*; a *follower* begins alike, and takes a copy of the leader's
KV as soon as that covers what both have in common. The leader has at least as many tokens already,
and a follower takes no turn meanwhile, so waiting is never longer than computing. If the leader
ends before that, its followers go on with its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from engines.http import CacheOutcome
from engines.mlx_worker.batch.request import PrefillTask
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.sessions.hot_sessions import SHORTEST_SHARED, common_prefix

Then: TypeAlias = Callable[[CacheOutcome], None]


@dataclass(frozen=True)
class _Wait:
    leader: PrefillTask
    num_tokens: int  # that both have in common
    outcome: CacheOutcome  # of the KV that the follower has already
    then: Then


class SharedPrefills:
    """The prompts that wait for another's prefill. Belongs to the owner thread."""

    def __init__(self) -> None:
        self._waits: dict[PrefillTask, _Wait] = {}  # by follower

    def follow(
        self, task: PrefillTask, ready: Iterable[PrefillTask], outcome: CacheOutcome, then: Then
    ) -> int:
        """Let the task wait for one of those that are fed; return the tokens that it will have.

        0 = none of them is of use, and ``then`` is not called. Else it is called once, at the
        latest when the leader ends.
        """
        found = [(_num_shared(task, x), x) for x in ready if x.num_cached >= task.num_cached]
        shared, leader = max(found, key=lambda x: x[0], default=(0, task))
        if shared - task.num_cached < SHORTEST_SHARED:
            return 0
        self._waits[task] = _Wait(leader, shared, outcome, then)
        if not kv_arrays.can_always_trim(leader.caches):
            leader.pauses.add(shared)
        self.fed(leader)
        return shared

    def fed(self, leader: PrefillTask) -> None:
        """Give its followers what they wait for, as far as it is there."""
        self._end(leader, lambda wait: wait.num_tokens <= leader.num_cached)

    def leave(self, task: PrefillTask, *, usable: bool) -> None:
        """Forget a task that is fed no more; ``usable``: its KV is right as far as it goes."""
        self._waits.pop(task, None)
        if not usable:
            task.num_cached, task.caches = 0, []
        self._end(task, lambda wait: True)

    def _end(self, leader: PrefillTask, is_over: Callable[[_Wait], bool]) -> None:
        waits = [(x, y) for x, y in self._waits.items() if y.leader is leader and is_over(y)]
        for task, _ in waits:
            del self._waits[task]
        for task, wait in waits:
            wait.then(_taken(task, wait) or wait.outcome)


def _num_shared(task: PrefillTask, other: PrefillTask) -> int:
    """Count the tokens that a task can take over from another one; 0 for another tenant's."""
    one, two = task.request.generation.session, other.request.generation.session
    if one is None or two is None or (one.tenant, one.salt) != (two.tenant, two.salt):
        return 0
    shared = min(common_prefix(task.tokens, other.tokens), task.target, other.target)
    is_behind = other.num_cached <= shared or kv_arrays.can_trim(other.caches)
    return shared if is_behind else 0


def _taken(task: PrefillTask, wait: _Wait) -> CacheOutcome | None:
    """Let a follower start from its leader's KV; None if it has as much of its own."""
    leader = wait.leader
    count = min(wait.num_tokens, leader.num_cached)
    if count - task.num_cached < SHORTEST_SHARED:
        return None
    if count < leader.num_cached and not kv_arrays.can_trim(leader.caches):
        return None
    caches = kv_arrays.copy_of(leader.caches)
    kv_arrays.trim(caches, leader.num_cached - count)
    task.reuse(caches, count, None)
    task.request.note_restored(min(leader.request.restored_tokens, count))
    return CacheOutcome("hot", count)
