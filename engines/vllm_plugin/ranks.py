"""The worker halves, as the half beside vLLM's scheduler sees them (``hub``)."""

from __future__ import annotations

from typing import Protocol

from engines.vllm_plugin.messages import Peek, Release, Stage, Staged


class Ranks(Protocol):
    """The way to the worker halves, thread-safe and without waiting."""

    @property
    def ready(self) -> bool:
        """Every rank is connected."""

    @property
    def packed_bytes_per_token(self) -> int:
        """Of all ranks together; known once they are ready."""

    def send(self, message: Stage | Peek | Release) -> None: ...
    def staged(self, ticket: int, within_s: float = 0.0) -> Staged | None:
        """The answer of all ranks together, once; the shortest of them counts."""
