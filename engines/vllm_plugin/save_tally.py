"""When a save is whole: every rank has stored its share of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engines.vllm_plugin.messages import RankSaved

# Of a save whose ranks do not all answer (one lost its connection) nobody waits for the rest.
MAX_OPEN: Final = 1024


@dataclass
class _Tally:
    num_ended: int = 0
    is_kept: bool = True  # by every rank so far


class SaveTally:
    """Bounded; on the hub's event loop."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, _Tally] = {}  # by job, the oldest first

    def __len__(self) -> int:
        """Saves that some rank is still to tell of."""
        return len(self._open)

    def is_whole(self, saved: RankSaved) -> bool:
        """Whether this was the last rank's answer, and all of them kept the save."""
        tally = self._open.setdefault(saved.job, _Tally())
        tally.num_ended += 1
        tally.is_kept &= saved.kept
        if tally.num_ended >= self._num_ranks:
            del self._open[saved.job]
            return tally.is_kept
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        return False
