"""Says whether there is memory for one more: the rule of admission.

Everything that was admitted is charged as if it decoded already, in the bucket it will be in:
sequences x longest. To this are added the bytes that a sequence takes for a moment when it joins or
leaves a batch, the KV of idle sessions, and the KV of parked sequences. If the sum is over the
budget, idle sessions go; if that is not enough, the newcomer waits; if running sequences outgrow
the budget, one is sent back: it goes into the queue, and its KV becomes an idle session like any
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engines.kv_budget import KVCost, batch_bytes, passing_bytes
from engines.mlx_worker.batch.batches import Batches
from engines.mlx_worker.batch.fair_queue import FairQueue
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.request import PrefillTask, Sequence
from engines.mlx_worker.sessions.hot_sessions import HotSessions, SessionKey
from kvstore.blobs.snapshot import state_nbytes


def guest_places(max_sequences: int) -> int:
    """Return how many sequences may run for a while beyond ``max_sequences``."""
    return max_sequences // 4


class MemoryBudget:
    """Compares the memory in use with the budget; drops nothing itself."""

    def __init__(
        self,
        hot_bytes: int,
        max_sequences: int,
        cost: KVCost,
        batches: Batches,
        prefiller: Prefiller,
        hot: HotSessions,
        queue: FairQueue[PrefillTask],
    ) -> None:
        self.hot_bytes = hot_bytes  # may change while requests run
        self._max_sequences = max_sequences
        self._cost = cost
        self._batches = batches
        self._prefiller = prefiller
        self._hot = hot
        self._queue = queue

    @property
    def num_running(self) -> int:
        """Sequences that decode."""
        return len(self._batches)

    def sequence_bytes(self, num_tokens: int) -> int:
        """The bytes that a running sequence of ``num_tokens`` tokens may take."""
        return self._cost.row_bytes(num_tokens)

    def missing_slots(self, num_sequences: int) -> int:
        """The number of places that so many more sequences lack; 0 or less = there is room."""
        return self.places.total() - len(self._guests) + num_sequences - self._max_sequences

    @property
    def places_of_residents(self) -> Counter[str]:
        """The places that tenants hold, by tenant: guests have none."""
        return self.places - Counter(x.request.tenant for x in self._guests)

    @property
    def has_guest_place(self) -> bool:
        """True if one more sequence may run beyond the places."""
        return len(self._guests) < guest_places(self._max_sequences)

    @property
    def _guests(self) -> list[Sequence]:
        waiting = (x for task in self._prefiller.admitted for x in task.sequences)
        return [x for x in (*self._batches.sequences, *waiting) if x.is_guest]

    @property
    def places(self) -> Counter[str]:
        """Sequences that decode, or are on their way to it, by tenant."""
        places = Counter(x.request.tenant for x in self._batches.sequences)
        for task in self._prefiller.admitted:
            places[task.request.tenant] += len(task.sequences)
        return places

    def missing_for(self, task: PrefillTask, own: SessionKey | None) -> int:
        """Bytes that must be freed before the task may enter.

        The hot KV of its own session, ``own``, and the KV that it was parked with do not count: the
        task starts from them.
        """
        shapes = self._shapes([*self._prefiller.admitted, task])
        hot = self._hot.get(own) if own else None
        reused = (hot.nbytes if hot else 0) + task.parked_bytes
        return self._used(shapes) - reused - self.hot_bytes

    def missing(self) -> int:
        """Bytes by which running and idle KV exceeds the budget; negative = to spare."""
        return self._used(self._shapes(self._prefiller.admitted)) - self.hot_bytes

    def _used(self, shapes: list[tuple[int, int]]) -> int:
        running = batch_bytes(self._cost, shapes) + passing_bytes(self._cost, shapes)
        return running + self._hot.nbytes + self.parked_bytes + self._snapshot_bytes()

    @property
    def parked_bytes(self) -> int:
        """Bytes of those that wait with their KV."""
        return sum(x.parked_bytes for x in self._queue.items())

    def _snapshot_bytes(self) -> int:
        requests = {x.request for x in self._batches.sequences}
        requests |= {task.request for task in self._prefiller.admitted}
        requests |= {x.request for x in self._queue.items() if x.parked_bytes}
        return sum(state_nbytes(x.state) for request in requests for x in request.snapshots)

    def _shapes(self, tasks: Iterable[PrefillTask]) -> list[tuple[int, int]]:
        """(sequences, longest) of each bucket, once ``tasks`` are in."""
        shapes = [(len(x.sequences), x.longest) for x in self._batches.buckets]
        for task in tasks:
            index = self._batches.index_of(len(task.tokens))
            num_sequences, longest = shapes[index]
            shapes[index] = (num_sequences + len(task.sequences), max(longest, len(task.tokens)))
        return shapes
