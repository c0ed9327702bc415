"""The interface of the scheduler side to the ranks while vLLM schedules; ``Hub`` implements it."""

from __future__ import annotations

from typing import Protocol

from engines.vllm_plugin.messages import Probe, Release, Stage, Staged


class RankClient(Protocol):
    """Sends to all ranks and collects their answers. Thread-safe; no method waits for long."""

    @property
    def ready(self) -> bool:
        """True if every rank is connected."""

    @property
    def packed_bytes_per_token(self) -> int:
        """The bytes of a stored token on all ranks together; known once they are ready."""

    def send(self, message: Stage | Probe | Release) -> None:
        """Send the message to every rank."""

    def staged(self, ticket: int, within_s: float = 0.0) -> Staged | None:
        """The joint answer of all ranks to a ``Stage`` or ``Probe``; it is returned only once.

        It offers only the blocks that every rank has. None if a rank has not answered after
        ``within_s`` seconds.
        """
