"""Whether there is memory for one more: the rule of admission.

Everything that was admitted is charged as if it decoded already, in the bucket it will be in:
rows x longest. On top comes what a row that joins or leaves a batch takes for a moment, and what
idle sessions hold. If that is over the budget, idle sessions go; if that is not enough, the
newcomer waits; if running rows outgrow the budget, the youngest goes back into the line and its KV
becomes an idle session like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

from engines.kv_budget import KVCost, batch_bytes, passing_bytes
from engines.mlx_worker.batching import Batches
from engines.mlx_worker.hot import HotSessions
from engines.mlx_worker.turn import Prompt, SessionKey
from kvstore.snapshot import state_nbytes


class Room:
    """Numbers only; drops nothing itself."""

    def __init__(
        self,
        hot_bytes: int,
        max_rows: int,
        cost: KVCost,
        batches: Batches,
        hot: HotSessions,
        admitted: dict[Prompt, None],
    ) -> None:
        """``admitted``: prompts on their way into a batch."""
        self._hot_bytes = hot_bytes
        self._max_rows = max_rows
        self._cost = cost
        self._batches = batches
        self._hot = hot
        self._admitted = admitted

    @property
    def num_rows(self) -> int:
        """Rows that decode."""
        return len(self._batches)

    def row_bytes(self, num_tokens: int) -> int:
        return self._cost.row_bytes(num_tokens)

    def has_slots(self, num_rows: int) -> bool:
        taken = len(self._batches) + sum(len(x.rows) for x in self._admitted)
        return taken + num_rows <= self._max_rows

    def missing_for(self, prompt: Prompt, own: SessionKey | None) -> int:
        """Bytes that must be freed before the prompt may enter; its own hot KV is no obstacle."""
        shapes = self._shapes([*self._admitted, prompt])
        hot = self._hot.get(own) if own else None
        reused = hot.nbytes if hot else 0
        return self._used(shapes) - reused - self._hot_bytes

    def missing(self) -> int:
        """Bytes by which what runs and what idles exceed the budget."""
        return self._used(self._shapes(self._admitted)) - self._hot_bytes

    def _used(self, shapes: list[tuple[int, int]]) -> int:
        running = batch_bytes(self._cost, shapes) + passing_bytes(self._cost, shapes)
        return running + self._hot.nbytes + self._snapshot_bytes()

    def _snapshot_bytes(self) -> int:
        turns = {row.turn for bucket in self._batches.buckets for row in bucket.rows.values()}
        turns |= {prompt.turn for prompt in self._admitted}
        return sum(state_nbytes(x.state) for turn in turns for x in turn.snapshots)

    def _shapes(self, prompts: Iterable[Prompt]) -> list[tuple[int, int]]:
        """(rows, longest) of each bucket, once ``prompts`` are in."""
        shapes = [(len(x.rows), x.longest) for x in self._batches.buckets]
        for prompt in prompts:
            index = self._batches.index_of(len(prompt.tokens))
            rows, longest = shapes[index]
            shapes[index] = (rows + len(prompt.rows), max(longest, len(prompt.tokens)))
        return shapes
