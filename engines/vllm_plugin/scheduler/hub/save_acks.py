"""Counts the ranks that have stored their share of a save: it is complete when all of them have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engines.vllm_plugin.messages import RankSaved

# A rank that lost its connection never reports a save; the oldest such saves are forgotten.
MAX_OPEN: Final = 1024


@dataclass
class _Tally:
    num_ended: int = 0
    is_kept: bool = True  # by every rank so far


class SaveAcks:
    """The saves that at least one rank has not reported yet; bounded. On the hub's event loop."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, _Tally] = {}  # by job, the oldest first

    def __len__(self) -> int:
        """The number of saves that at least one rank has not reported yet."""
        return len(self._open)

    def completes(self, saved: RankSaved) -> bool:
        """Note the answer of one rank; True if it was the last one and all ranks kept the save."""
        tally = self._open.setdefault(saved.job, _Tally())
        tally.num_ended += 1
        tally.is_kept &= saved.kept
        if tally.num_ended >= self._num_ranks:
            del self._open[saved.job]
            return tally.is_kept
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        return False
