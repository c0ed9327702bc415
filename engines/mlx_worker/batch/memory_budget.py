"""The rule of admission: is there memory for one more?

Everything that was admitted is charged as if it decoded already, in the bucket it will be in:
sequences x longest. To this are added the copy that is made while a sequence joins or leaves a
batch, the KV of idle sessions, and the states that running requests keep. If the sum is over the
budget, idle sessions go; if that is not enough, the newcomer waits; if running sequences outgrow
the budget, the youngest is sent back: it goes into the queue, and its KV becomes an idle session
like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

from engines.kv_budget import KVCost, batch_bytes, passing_bytes
from engines.mlx_worker.batch.batches import Batches
from engines.mlx_worker.batch.prefill import Prefiller
from engines.mlx_worker.batch.request import PrefillTask
from engines.mlx_worker.sessions.hot_sessions import HotSessions
from kvstore.blobs.state_tree import state_nbytes
from kvstore.session import SessionName


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
    ) -> None:
        self.hot_bytes = hot_bytes  # may change while requests run
        self._max_sequences = max_sequences
        self._cost = cost
        self._batches = batches
        self._prefiller = prefiller
        self._hot = hot

    @property
    def num_running(self) -> int:
        """Sequences that decode."""
        return len(self._batches)

    def sequence_bytes(self, num_tokens: int) -> int:
        """The bytes that a running sequence of ``num_tokens`` tokens may take."""
        return self._cost.row_bytes(num_tokens)

    @property
    def has_place(self) -> bool:
        """True if one more sequence may run."""
        waiting = sum(len(task.sequences) for task in self._prefiller.admitted)
        return self.num_running + waiting < self._max_sequences

    def missing_for(self, task: PrefillTask, own: SessionName | None) -> int:
        """Bytes that must be freed before the task may enter.

        The hot KV of its own session, ``own``, does not count: the task starts from it.
        """
        shapes = self._shapes([*self._prefiller.admitted, task])
        hot = self._hot.get(own) if own else None
        return self._used(shapes) - (hot.nbytes if hot else 0) - self.hot_bytes

    def missing(self) -> int:
        """Bytes by which running and idle KV exceeds the budget; negative = to spare."""
        return self._used(self._shapes(self._prefiller.admitted)) - self.hot_bytes

    def _used(self, shapes: list[tuple[int, int]]) -> int:
        running = batch_bytes(self._cost, shapes) + passing_bytes(self._cost, shapes)
        return running + self._hot.nbytes + self._state_bytes()

    def _state_bytes(self) -> int:
        requests = {x.request for x in self._batches.sequences}
        requests |= {task.request for task in self._prefiller.admitted}
        return sum(state_nbytes(x.tree) for request in requests for x in request.taken_states)

    def _shapes(self, tasks: Iterable[PrefillTask]) -> list[tuple[int, int]]:
        """(sequences, longest) of each bucket, once ``tasks`` are in."""
        shapes = [(len(x.sequences), x.longest) for x in self._batches.buckets]
        for task in tasks:
            index = self._batches.index_of(len(task.tokens))
            num_sequences, longest = shapes[index]
            shapes[index] = (num_sequences + len(task.sequences), max(longest, len(task.tokens)))
        return shapes
