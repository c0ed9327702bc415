"""How the scheduler side reaches the ranks while vLLM schedules; ``Hub`` implements it."""

from __future__ import annotations

from typing import Protocol

from engines.vllm_plugin.messages import Probe, Release, Stage, Staged


class RankClient(Protocol):
    """Sends to all ranks and collects their answers. Thread-safe; nothing here waits for long."""

    @property
    def ready(self) -> bool:
        """Every rank is connected."""

    @property
    def packed_bytes_per_token(self) -> int:
        """Bytes that a stored token takes on all ranks together; known once they are ready."""

    def send(self, message: Stage | Probe | Release) -> None:
        """Send the message to every rank."""

    def staged(self, ticket: int, within_s: float = 0.0) -> Staged | None:
        """The joint answer of all ranks to a ``Stage`` or ``Probe``, given once.

        It offers no more than the rank that has least. None if some rank has not answered after
        ``within_s`` seconds.
        """
