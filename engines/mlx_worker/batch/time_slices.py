"""Takes places from those that hold more than their share, while somebody waits for one.

A row that makes way is *parked*: it waits with its KV, and goes on later with the same tokens. When
memory is what is missing, those that are parked are *sent back* instead, and then rows that run:
their KV becomes an idle session like any other, which sleeps, and is restored or computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engines.host.fair_shares import QUANTUM, FairShares
from engines.host.line_order import LONG_ANSWER
from engines.mlx_worker.batch.admission import Admission
from engines.mlx_worker.batch.batches import Batches, StepOutput
from engines.mlx_worker.batch.memory_budget import MemoryBudget
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.request import PrefillTask, Sequence
from engines.mlx_worker.batch.running_requests import RunningRequests
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.sessions.hot_cache import HotCache

# Delivers a token that a row had sampled, but not fed, when it left its batch.
Deliver: TypeAlias = Callable[[StepOutput], None]

# Whoever makes way for want of memory is saved and restored, which costs more than a place.
MEMORY_QUANTUM = 4 * QUANTUM


class TimeSlices:
    """Decides who makes way, and how. Belongs to the owner thread."""

    def __init__(
        self,
        shares: FairShares,
        admission: Admission,
        prefiller: Prefiller,
        batches: Batches,
        budget: MemoryBudget,
        hot_cache: HotCache,
        requests: RunningRequests,
    ) -> None:
        self._shares = shares
        self._admission = admission
        self._prefiller = prefiller
        self._batches = batches
        self._budget = budget
        self._hot_cache = hot_cache
        self._requests = requests
        self.counters: Counter[str] = Counter()

    def make_way(self, deliver: Deliver) -> None:
        """Let the head of the line in, and those behind it, as far as others are beyond theirs."""
        self._admission.admit()
        for _ in range(self._budget.places.total()):
            head = self._admission.head
            if head is None or not self._make_way_for(head, deliver):
                break
        self._take_turns(deliver)

    def _take_turns(self, deliver: Deliver) -> None:
        """Let heads change places with their own tenant's rows, whoever is first in the line."""
        for head in self._admission.heads:
            goes_on = bool(head.parked_bytes)
            while self._budget.missing_slots(len(head.sequences)) > 0:
                unit = self._own_to_yield(head, QUANTUM)
                if unit is None:
                    break
                self._park(unit, deliver)
                goes_on = True
            else:
                if goes_on and self._is_its_turn(head):
                    self._admission.enter(head)

    def _make_way_for(self, head: PrefillTask, deliver: Deliver) -> bool:
        """Give ``head`` the places that it lacks, or free some memory; False if nobody is to."""
        if self._budget.missing_slots(len(head.sequences)) > 0:
            return self._give_places(head, deliver)
        if self._hot_cache.is_saving:  # and so about to release memory
            return False
        if self.release_parked(head):
            self._admission.admit()
            return True
        unit = self._unit_to_yield(head, 1, MEMORY_QUANTUM)
        unit = unit or self._own_to_yield(head, MEMORY_QUANTUM)
        if isinstance(unit, Sequence):
            self.send_back(unit, deliver)
        return False

    def _give_places(self, head: PrefillTask, deliver: Deliver) -> bool:
        while (missing := self._budget.missing_slots(len(head.sequences))) > 0:
            unit = self._unit_to_yield(head, missing, QUANTUM) or self._own_to_yield(head, QUANTUM)
            if unit is None:
                return False
            self._park(unit, deliver)
        return self._admission.enter(head)  # itself: another may be first in the line by now

    # ---- who

    def _is_its_turn(self, head: PrefillTask) -> bool:
        """True if it has waited while each row of its own tenant ran for a quantum."""
        tenant = head.request.tenant
        waited = self._shares.tokens(tenant) - head.waits_from
        return waited >= QUANTUM * self._budget.places[tenant]

    def _own_to_yield(self, head: PrefillTask, quantum: float) -> Sequence | PrefillTask | None:
        """The one of its own tenant that changes places with ``head``, if it is its turn.

        For who is parked any that run; for who has not begun only a long answer, which has gone on
        for a quantum at least since it made way the last time.
        """
        tenant = head.request.tenant
        if not self._is_its_turn(head):
            return None
        if head.parked_bytes:
            return self._longest_run(tenant)
        long = [
            x
            for x in self._batches.sequences
            if x.request.tenant == tenant and len(x.emitted) >= LONG_ANSWER and x.run >= quantum
        ]
        return max(long, key=lambda x: x.run, default=None)

    def _unit_to_yield(
        self, head: PrefillTask, missing: int, quantum: float
    ) -> Sequence | PrefillTask | None:
        claimant, wanted = head.request.tenant, len(head.sequences)
        holder = self._shares.holder_to_yield(
            claimant, wanted, missing, self._budget.places, quantum
        )
        return None if holder is None else self._longest_run(holder)

    def _longest_run(self, tenant: str) -> Sequence | PrefillTask | None:
        """The tenant's sequence, or its prompt that is being fed, that was served longest."""
        units: list[Sequence | PrefillTask] = [*self._batches.sequences, *self._prefiller.ready]
        mine = [x for x in units if x.request.tenant == tenant]
        return max(mine, key=lambda x: x.run, default=None)

    def youngest(self) -> Sequence:
        """The sequence to be sent back when those that run have outgrown the memory.

        That is the last that came, of the tenant that holds most by its weight.
        """
        places, shares = self._budget.places, self._shares

        def rank(x: Sequence) -> tuple[float, int]:
            return shares.held(x.request.tenant, places[x.request.tenant]), x.entered

        return max(self._batches.sequences, key=rank)

    # ---- how

    def _park(self, unit: Sequence | PrefillTask, deliver: Deliver) -> None:
        """Have it wait with its KV."""
        if isinstance(unit, PrefillTask):
            self._prefiller.remove(unit)
            task = unit
        elif (caches := self._detached(unit, deliver)) is not None:
            task = _rest_of(unit, caches)
        else:
            return
        self.counters["parked"] += 1
        if task.num_cached:
            mx.eval([cache.state for cache in task.caches])  # else they hold the batch they left
            task.parked_bytes = kv_arrays.nbytes_of(task.caches)
        task.run = 0
        self._wait(task)

    def release_parked(self, spare: PrefillTask | None = None) -> bool:
        """Take the KV of one that is parked, but not ``spare``'s; it will be restored or computed.

        False: there is none.
        """
        parked = [x for x in self._admission.parked if x is not spare]
        if not parked:
            return False
        self.counters["sent_back"] += 1
        task = parked[-1]
        if task.num_cached:
            self._requests.keep(task.sequences[0], task.caches, task.num_cached)
        task.let_go()
        mx.clear_cache()
        return True

    def send_back(self, sequence: Sequence, deliver: Deliver) -> None:
        """Take a sequence out of its batch and into the line; its KV becomes an idle session."""
        self.counters["sent_back"] += 1
        caches = self._detached(sequence, deliver)
        if caches is not None:
            task = _rest_of(sequence, caches)
            self._requests.keep(sequence, caches, task.num_cached)
            task.let_go()
            self._wait(task)

    def _wait(self, task: PrefillTask) -> None:
        task.waits_from = self._shares.tokens(task.request.tenant)
        self._admission.requeue(task)

    def _detached(self, sequence: Sequence, deliver: Deliver) -> Caches | None:
        """Take it out of its batch; None if it ends with the token that it had sampled."""
        (detached,) = self._batches.detach([sequence])
        if (output := detached.step()) is not None:
            deliver(output)
        return detached.caches if sequence in sequence.request.sequences else None


def _rest_of(sequence: Sequence, caches: Caches) -> PrefillTask:
    """Make the task that goes on with a sequence; ``caches`` hold all its tokens but the last."""
    tokens = np.array(sequence.tokens, np.int32)
    return PrefillTask(sequence.request, [sequence], tokens, caches, len(tokens) - 1)
