"""Takes places from those that hold more than their share, while a request waits for one.

A request of a tenant that has no place yet *visits*: its row runs beyond the places until it was
served a quantum, which most answers do not need, and no row makes way before that is over. It does
so once, and only where its tenant is not ahead of those that have places.

A row that makes way is *parked*: it waits with its KV, and goes on later with the same tokens. When
memory is short, parked rows are *sent back* instead, and after them running rows:
their KV becomes an idle session like any other, which sleeps, and is restored or computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import numpy as np

from engines.host.fair_shares import LONG_ANSWER, PROMPT_TOKEN, QUANTUM, FairShares
from engines.mlx_worker.batch.admission import Admission
from engines.mlx_worker.batch.batches import Batches, MemoryBudget, StepOutput
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.request import PrefillTask, RunningRequests, Sequence
from engines.mlx_worker.cache import kv_arrays
from engines.mlx_worker.cache.layout import Caches
from engines.mlx_worker.sessions.hot_cache import HotCache

# Delivers a token that a row had sampled, but not fed, when it left its batch.
Deliver: TypeAlias = Callable[[StepOutput], None]
# What makes way as a whole: a sequence that decodes, or a prompt that is being fed.
Unit: TypeAlias = Sequence | PrefillTask

# A row that makes way for want of memory is saved and restored, which costs more than a place.
MEMORY_QUANTUM = 4 * QUANTUM


@dataclass
class _Running:
    """Holds what runs, less what is chosen to make way."""

    units: list[Unit]
    places: Counter[str]
    num_given: int = 0  # places that those chosen hold

    def longest_run(
        self, tenant: str, may: Callable[[Unit], bool] = lambda unit: True
    ) -> Unit | None:
        """The one of the tenant's that was served longest, of those that ``may`` make way."""
        mine = [x for x in self.units if x.request.tenant == tenant and may(x)]
        return max(mine, key=lambda x: x.run, default=None)

    def give(self, unit: Unit) -> None:
        """Choose one to make way."""
        number = len(_sequences(unit))
        self.units.remove(unit)
        self.places[unit.request.tenant] -= number
        self.num_given += number


# Chooses one that makes way for the first, of those that run.
Choose: TypeAlias = Callable[[PrefillTask, _Running], Unit | None]


def _is_long(unit: Unit) -> bool:
    return isinstance(unit, Sequence) and len(unit.emitted) >= LONG_ANSWER


def _sequences(unit: Unit) -> list[Sequence]:
    return unit.sequences if isinstance(unit, PrefillTask) else [unit]


def _is_guest(unit: Unit) -> bool:
    return any(x.is_guest for x in _sequences(unit))


def _end_visit(unit: Unit) -> None:
    for sequence in _sequences(unit):
        sequence.is_guest = False


def _served(unit: Unit) -> float:
    """Tokens that a guest was served since it was let in, as shares count them."""
    return unit.run * (PROMPT_TOKEN if isinstance(unit, PrefillTask) else 1)


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
        """Let the head of the line in, and those after it, as far as others are beyond theirs."""
        self._admission.admit()
        self._end_visits(deliver)
        for _ in range(self._budget.places.total()):
            head = self._admission.head
            if head is None or not self._make_way_for(head, deliver):
                break
        self._take_turns(deliver)

    def _take_turns(self, deliver: Deliver) -> None:
        """Let heads change places with their own tenant's rows, regardless of the line's order."""
        for head in self._admission.heads:
            units = self._enough_to_yield(head, self._own_to_yield)
            if units is None:
                continue
            self._park_all(units, deliver)
            running = self._running()
            if (units or head.parked_bytes) and self._is_its_turn(head, running):
                self._admission.enter(head)

    def _make_way_for(self, head: PrefillTask, deliver: Deliver) -> bool:
        """Give ``head`` the places that it lacks, or free some memory; False if no row is to."""
        if self._budget.missing_slots(len(head.sequences)) > 0:
            return self._give_places(head, deliver)
        if self._hot_cache.is_saving:  # and so about to release memory
            return False
        if self.release_parked(head):
            self._admission.admit()
            return True
        running = self._running()
        unit = self._others_to_yield(head, running, MEMORY_QUANTUM)
        unit = unit or self._own_to_yield(head, running, MEMORY_QUANTUM)
        if isinstance(unit, Sequence):
            self.send_back(unit, deliver)
        return False

    def _give_places(self, head: PrefillTask, deliver: Deliver) -> bool:
        if self._may_visit(head) and self._admission.visit(head):
            self.counters["visits"] += 1
            return True
        units = self._enough_to_yield(head, self._anyone_to_yield)
        if units is None:
            return False
        self._park_all(units, deliver)
        return self._admission.enter(head)  # itself: another may be first in the line by now

    def _may_visit(self, head: PrefillTask) -> bool:
        """True if it is new, of a tenant that has no place and is ahead of none that has one."""
        places, tenant = self._budget.places, head.request.tenant
        if places[tenant] or head.made_way:
            return False
        least = min((self._shares.count(x) for x, number in places.items() if number), default=0.0)
        return self._shares.count(tenant) - least < QUANTUM

    def _end_visits(self, deliver: Deliver) -> None:
        """Give guests a place of their own: a free one, or after a quantum one of another row."""
        for guest in self._guests():
            if guest not in self._guests():  # ended with one that was parked before
                continue
            if self._budget.missing_slots(1) > 0:
                if _served(guest) < QUANTUM:
                    continue
                self._make_way_for_guest(guest, deliver)
            if self._budget.missing_slots(1) > 0:  # no row was to make way
                self._park(guest, deliver)
            else:
                _end_visit(guest)

    def _make_way_for_guest(self, guest: Unit, deliver: Deliver) -> None:
        running = self._running()
        holder = self._shares.holder_to_yield(guest.request.tenant, 1, 1, running.places)
        unit = running.longest_run(holder) if holder is not None else None
        if unit is not None:
            self._park(unit, deliver)

    # ---- who

    def _units(self) -> list[Unit]:
        return [*self._batches.sequences, *self._prefiller.ready]

    def _guests(self) -> list[Unit]:
        return [x for x in self._units() if _is_guest(x)]

    def _running(self) -> _Running:
        """List what has a place: if a guest made way, no request would have one more."""
        units = [x for x in self._units() if not _is_guest(x)]
        return _Running(units, self._budget.places_of_residents)

    def _enough_to_yield(self, head: PrefillTask, choose: Choose) -> list[Unit] | None:
        """Choose who makes way for all sequences of ``head``; None if that cannot be enough.

        A place too few is of no use to it, and its former row would be back with the next step.
        """
        missing = self._budget.missing_slots(len(head.sequences))
        running, chosen = self._running(), list[Unit]()
        while running.num_given < missing:
            unit = choose(head, running)
            if unit is None:
                return None
            running.give(unit)
            chosen.append(unit)
        return chosen

    def _is_its_turn(self, head: PrefillTask, running: _Running) -> bool:
        """True if it has waited while each row of its own tenant ran for a quantum."""
        tenant = head.request.tenant
        waited = self._shares.tokens(tenant) - head.waits_from
        return waited >= QUANTUM * running.places[tenant]

    def _anyone_to_yield(self, head: PrefillTask, running: _Running) -> Unit | None:
        return self._others_to_yield(head, running) or self._own_to_yield(head, running)

    def _own_to_yield(
        self, head: PrefillTask, running: _Running, quantum: float = QUANTUM
    ) -> Unit | None:
        """The one of its own tenant that changes places with ``head``, if it is its turn.

        For who is parked any that run; for who has not begun only a long answer, which has gone on
        for a quantum at least since it made way the last time.
        """
        tenant = head.request.tenant
        if not self._is_its_turn(head, running):
            return None
        if head.parked_bytes:
            return running.longest_run(tenant)
        return running.longest_run(tenant, lambda x: _is_long(x) and x.run >= quantum)

    def _others_to_yield(
        self, head: PrefillTask, running: _Running, quantum: float = QUANTUM
    ) -> Unit | None:
        wanted = len(head.sequences)
        missing = max(1, self._budget.missing_slots(wanted) - running.num_given)
        holder = self._shares.holder_to_yield(
            head.request.tenant, wanted, missing, running.places, quantum
        )
        return None if holder is None else running.longest_run(holder)

    def youngest(self) -> Sequence:
        """The sequence to be sent back when those that run have outgrown the memory.

        That is the last that came, of the tenant that holds most by its weight.
        """
        places, shares = self._budget.places, self._shares

        def rank(x: Sequence) -> tuple[float, int]:
            return shares.held(x.request.tenant, places[x.request.tenant]), x.entered

        return max(self._batches.sequences, key=rank)

    # ---- how

    def _park_all(self, units: list[Unit], deliver: Deliver) -> None:
        for unit in units:
            if unit in self._running().units:  # else it ended with one that was parked before
                self._park(unit, deliver)

    def _park(self, unit: Unit, deliver: Deliver) -> None:
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
        _end_visit(task)
        task.made_way = True
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
