"""Finds the longest prefix of a prompt whose KV need not be computed.

There are three sources: the session's own hot KV, a copy of another hot session of the same tenant
with the same beginning, and the cold store. The longest is used, unless a restore would add so
little to hot KV that computing it is faster.

A prompt may also share the prefill of another prompt of its tenant. The prompt that is fed is the
*leader*; a *follower* has the same beginning, and takes a copy of the leader's KV as soon as that
covers the tokens that both share. The leader has at least as many tokens already, and a follower
takes no turns meanwhile, so waiting never takes longer than computing. If the leader ends early,
its followers start from the KV that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from engines.http import COLD_SOURCES, CacheOutcome
from engines.mlx_worker.batch.request import PrefillTask
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.sessions.cold_sessions import ColdPrefix
from engines.mlx_worker.sessions.hot_sessions import (
    SHORTEST_SHARED,
    HotCache,
    HotPrefix,
    common_prefix,
    resolved,
    whole_chunks,
)
from kvstore.session import UNKNOWN_REASONS, MissReason

Then: TypeAlias = Callable[[CacheOutcome], None]


class PrefixReuse:
    """Gives prefill tasks the caches that they start from; belongs to the owner thread."""

    def __init__(self, hot_cache: HotCache) -> None:
        self._hot_cache = hot_cache
        self._cold = hot_cache.cold
        # Tasks for which the cold store is searching.
        self._asked: dict[PrefillTask, tuple[HotPrefix | None, Then]] = {}

    def find(self, task: PrefillTask, then: Then) -> None:
        """Give the task the KV that it can reuse, then call ``then``, at once or after a restore.

        If there is no usable prefix, ``task.caches`` stay empty.
        """
        session = task.request.generation.session
        if session is None:
            then(CacheOutcome("miss", 0, "never-stored"))
            return
        had_own = self._hot_cache.sessions.get(session.name) is not None
        hot = self._hot_cache.take_prefix(session, task.tokens, task.target)
        if hot is not None:
            task.reuse(hot.pop_caches(), hot.num_tokens, hot.session.saved)
            task.request.note_restored(min(hot.session.restored_tokens, hot.num_tokens))
            if self._cold is not None:
                size = self._cold.store.chunk_tokens
                task.request.note_chain(hot.session.chain[: hot.num_tokens // size], size)
        if self._cold is None:
            missed: MissReason = "diverged" if had_own else "disabled"
            then(_outcome(task, hot, None if hot else missed))
        elif _is_enough(task, hot, self._cold.store.chunk_tokens):
            then(_outcome(task, hot, None))
        else:
            self._asked[task] = hot, then
            held, known = task.num_cached, task.request.chain
            found = partial(self._found, task)
            self._cold.find(session, task.tokens, task.target, held, known, found)

    def cancel(self, task: PrefillTask) -> None:
        """Stop the search for a task that is not wanted any more; its ``then`` is not called."""
        self._asked.pop(task, None)

    def _found(self, task: PrefillTask, found: ColdPrefix) -> None:
        if task not in self._asked:  # cancelled meanwhile
            return
        hot, then = self._asked.pop(task)
        outcome = self._use_cold(task, found)
        then(outcome or _outcome(task, hot, found.reason))

    def _use_cold(self, task: PrefillTask, found: ColdPrefix) -> CacheOutcome | None:
        if self._cold is None:
            return None
        if found.chain:
            task.request.note_chain(found.chain, self._cold.store.chunk_tokens)
        if found.restored is None or (caches := self._cold.rebuild(found)) is None:
            return None
        task.reuse(caches, found.restored.num_tokens, resolved(True))
        task.request.note_restored(found.restored.lossy_tokens)
        if session := task.request.generation.session:
            self._hot_cache.note_restored(session)
        assert found.restored.tier is not None
        source = COLD_SOURCES[found.restored.tier]
        return CacheOutcome(source, found.restored.num_tokens, found.reason)


def _is_enough(task: PrefillTask, hot: HotPrefix | None, chunk_tokens: int) -> bool:
    """Return whether no tier can add a chunk to this hot prefix.

    Without a hot prefix the store is always asked, since it also knows the reason of a miss.
    """
    if hot is None:
        return False
    whole = hot.own and not hot.diverged
    return whole or task.target // chunk_tokens * chunk_tokens <= task.num_cached


def _outcome(task: PrefillTask, hot: HotPrefix | None, reason: MissReason | None) -> CacheOutcome:
    """Return the outcome of a task that starts from hot KV, or from no KV."""
    if hot is None:
        return CacheOutcome("miss", 0, reason)
    if hot.num_tokens == task.target or reason in UNKNOWN_REASONS:
        reason = None
    elif hot.diverged and reason != "computed-sooner":
        reason = "diverged"
    return CacheOutcome("hot", hot.num_tokens, reason)


@dataclass(frozen=True)
class _Wait:
    leader: PrefillTask
    num_tokens: int  # tokens that both share
    outcome: CacheOutcome  # the outcome of the KV that the follower has already
    then: Then


class PrefillFollowers:
    """The prompts that wait for another's prefill; belongs to the owner thread."""

    def __init__(self) -> None:
        self._waits: dict[PrefillTask, _Wait] = {}  # by follower

    def follow(
        self, task: PrefillTask, ready: Iterable[PrefillTask], outcome: CacheOutcome, then: Then
    ) -> int:
        """Make the task follow one of ``ready``; return the number of tokens it will take over.

        0 = none of them helps, and ``then`` is not called. Otherwise ``then`` is called once, at
        the latest when the leader ends.
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
        """Start the leader's followers whose shared tokens it has computed."""
        self._end(leader, lambda wait: wait.num_tokens <= leader.num_cached)

    def leave(self, task: PrefillTask, *, usable: bool) -> None:
        """Forget a task that is not fed any more, and start its followers.

        ``usable``: the KV that it has computed so far is valid.
        """
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
    """Return the number of tokens that a task can take over from another; 0 across tenants."""
    one, two = task.request.generation.session, other.request.generation.session
    if one is None or two is None or (one.tenant, one.salt) != (two.tenant, two.salt):
        return 0
    shared = min(common_prefix(task.tokens, other.tokens), task.target, other.target)
    shared = whole_chunks(shared, other.request.restored_tokens)  # as ``_taken`` does
    is_behind = other.num_cached <= shared or kv_arrays.can_trim(other.caches)
    return shared if is_behind else 0


def _taken(task: PrefillTask, wait: _Wait) -> CacheOutcome | None:
    """Start a follower from its leader's KV; None if that has too few tokens more or is no use."""
    leader = wait.leader
    restored = leader.request.restored_tokens
    count = whole_chunks(min(wait.num_tokens, leader.num_cached), restored)
    if count - task.num_cached < SHORTEST_SHARED:
        return None
    if count < leader.num_cached and not kv_arrays.can_trim(leader.caches):
        return None
    caches = kv_arrays.copy_of(leader.caches)
    kv_arrays.trim(caches, leader.num_cached - count)
    task.reuse(caches, count, None)
    task.request.note_restored(min(restored, count))
    return CacheOutcome("hot", count)
