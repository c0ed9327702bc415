"""Asks, while there is no room to stage, whether a request has stored blocks worth waiting for.

Reading takes memory, so requests queue for it; a probe takes none. Without probes a new session
without stored blocks would wait for sessions that read gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.vllm_plugin.messages import Probe, Release
from engines.vllm_plugin.scheduler.hub.rank_client import RankClient
from engines.vllm_plugin.scheduler.tracked_request import TrackedRequest


class Probes:
    """Sends at most one probe per request, however often vLLM asks. On vLLM's thread."""

    def __init__(self, ranks: RankClient, tickets: Iterator[int]) -> None:
        self._ranks = ranks
        self._tickets = tickets

    def finds_nothing(
        self, tracked: TrackedRequest, first_block: int, hashes: Sequence[bytes]
    ) -> bool:
        """True once all ranks have answered that nothing is stored.

        The first call sends the probe. ``hashes``: of the prompt's blocks, from its beginning.
        """
        if tracked.probe is None:
            tracked.probe = next(self._tickets)
            joined = b"".join(map(bytes, hashes))
            self._ranks.send(Probe(tracked.probe, tracked.session, first_block, joined))
            return False
        answer = self._ranks.staged(tracked.probe)
        if answer is None or answer.end_block > first_block:
            return False
        tracked.reason = answer.reason
        return True

    def withdraw(self, tracked: TrackedRequest) -> None:
        """Forget the request's probe, if there is one: it does not wait any more."""
        if tracked.probe is not None:
            self._ranks.send(Release(tracked.probe))
            tracked.probe = None
