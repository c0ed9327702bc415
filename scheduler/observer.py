"""The interface through which the scheduler reports to logs, metrics and other listeners."""

from __future__ import annotations

from typing import NamedTuple

from engines.base import EngineReport, SessionRef, TierName


class Step(NamedTuple):
    """One change of a session, in words for observers."""

    before: str
    event: str  # an event, or "moved": to another tier, while cold
    after: str
    tier: TierName | None = None  # that holds its cold copy now
    left: str = ""  # the place that no longer holds its KV: "hot", a tier; "" = none
    why: str = ""  # it left: idle, pressure, memory, asked, engine, budget, expired, forgotten, ...


class Observer:
    """Receives every action of the scheduler, and ignores those that a subclass does not take.

    Called on the event loop; must not block.
    """

    def transition(self, ref: SessionRef, step: Step) -> None:
        """A session changed state, or the tier where it sleeps; called once for every change."""

    def row_changed(self, ref: SessionRef) -> None:
        """A row of the table is new, gone or changed; also called when nothing differs."""

    def engine_reported(self, report: EngineReport) -> None:
        """The engine reported its figures, as it does at every look of the sweeps."""

    def turn_waited(self, seconds: float) -> None:
        """A turn was admitted after this long in the waiting line."""

    def decision(self, name: str) -> None:
        """A decision was made: hibernate-idle, hibernate-pressure, prefetch, refused-full, ..."""

    def memory(self, level: str, available_bytes: int) -> None:
        """The machine's memory became scarce, low, or enough again."""


class Observers(Observer):
    """Passes every report on to several observers, in the order in which they were added."""

    def __init__(self, *observers: Observer) -> None:
        self._all = list(observers)

    def add(self, observer: Observer) -> None:
        self._all.append(observer)

    def transition(self, ref: SessionRef, step: Step) -> None:
        for each in self._all:
            each.transition(ref, step)

    def row_changed(self, ref: SessionRef) -> None:
        for each in self._all:
            each.row_changed(ref)

    def engine_reported(self, report: EngineReport) -> None:
        for each in self._all:
            each.engine_reported(report)

    def turn_waited(self, seconds: float) -> None:
        for each in self._all:
            each.turn_waited(seconds)

    def decision(self, name: str) -> None:
        for each in self._all:
            each.decision(name)

    def memory(self, level: str, available_bytes: int) -> None:
        for each in self._all:
            each.memory(level, available_bytes)
