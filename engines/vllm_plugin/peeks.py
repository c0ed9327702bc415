"""Asked while there is no room to stage: whether there is anything to wait for.

Reading takes memory, so it waits in line; looking takes none. Without it a new session, of which
nothing is stored, would stand behind those that read gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.vllm_plugin.messages import Peek, Release
from engines.vllm_plugin.ranks import Ranks
from engines.vllm_plugin.turn import Turn


class Peeks:
    """On vLLM's thread. One question per request, however often vLLM asks."""

    def __init__(self, ranks: Ranks, tickets: Iterator[int]) -> None:
        self._ranks = ranks
        self._tickets = tickets

    def finds_nothing(self, turn: Turn, first_block: int, hashes: Sequence[bytes]) -> bool:
        """For certain; False also while the ranks have not answered."""
        if turn.peek is None:
            turn.peek = next(self._tickets)
            joined = b"".join(map(bytes, hashes))
            self._ranks.send(Peek(turn.peek, turn.session, first_block, joined))
            return False
        answer = self._ranks.staged(turn.peek)
        if answer is None or answer.end_block > first_block:
            return False
        turn.reason = answer.reason
        return True

    def take_back(self, turn: Turn) -> None:
        """It is not waiting any more."""
        if turn.peek is not None:
            self._ranks.send(Release(turn.peek))
            turn.peek = None
