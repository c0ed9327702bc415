"""The protocol by which the scheduler reports to logs and metrics."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Hears of everything that the scheduler does. Called on the event loop; must not block."""

    def transition(self, session_id: str, before: str, event: str, after: str) -> None:
        """A session changed state; called once for every transition."""

    def turn_waited(self, seconds: float) -> None:
        """A turn was admitted after this long in the waiting line."""

    def decision(self, name: str) -> None:
        """Something was decided: hibernate-idle, hibernate-pressure, prefetch, refused-full, ..."""

    def memory(self, level: str, available_bytes: int) -> None:
        """The machine's memory became scarce, low, or enough again."""


class NullObserver:
    """Ignores everything."""

    def transition(self, session_id: str, before: str, event: str, after: str) -> None:
        pass

    def turn_waited(self, seconds: float) -> None:
        pass

    def decision(self, name: str) -> None:
        pass

    def memory(self, level: str, available_bytes: int) -> None:
        pass
