"""A chat session's life as one table, the only writer of its state, and observers of changes.

    active       at least one turn is being served; its KV is in the engine's batch
    idle         quiet, and its KV is still hot: the next turn prefills only the new text
    hibernating  a job is dropping the hot copy (the cold copy was written when the turn ended)
    cold         only the packed copy exists; which tier holds it is an attribute, not a state
    waking       the packed copy is being restored, for a turn or ahead of one
    leaving      deleted on request while a turn was served: what it saves must be deleted, too
    gone         nothing is left; a new turn starts a new session under the same id

Readers see two more words, which are attributes as well. *saving*: a client asked to put the
session to sleep, which happens as soon as it is saved; a turn cancels that. *away*: the session's
KV was in the memory of an engine that is not connected; the engine reports later what is left.

"Hot" means active, idle or hibernating. Two rules make the table safe:

- *Copy first, evict last.* A turn that arrives while hibernating only cancels; nothing was lost.
- *A job carries its number.* A hibernation that ends after a later turn has overtaken it is stale
  and must not be applied: see ``complete``.

The table holds the gateway's knowledge of sessions. Engines evict on their own, so it may be out of
date; the price is a prefill, never a wrong answer. ``learn`` takes over the engine's reports.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from engines.base import TIERS, EngineReport, KeptReason, SessionRef, SessionReport, TierName


class Step(NamedTuple):
    """One change of a session, in words for observers."""

    before: str
    event: str  # an event, or "moved": to another tier, while cold
    after: str
    tier: TierName | None = None  # of its cold copy, after the change
    left: str = ""  # the place that lost its KV: "hot" or a tier; "" = none
    why: str = ""  # the reason: idle, pressure, memory, asked, engine, budget, forgotten, ...


Listener = Callable[["Session", Step], None]  # the row as it is now, and its change


class State(enum.Enum):
    """The states of a session, as described above."""

    ACTIVE = "active"
    IDLE = "idle"
    HIBERNATING = "hibernating"
    COLD = "cold"
    WAKING = "waking"
    LEAVING = "leaving"
    GONE = "gone"


class Event(enum.Enum):
    """Everything that can change a session's state."""

    TURN = "turn"  # a request arrived
    QUIET = "quiet"  # the last running turn ended
    WAKE = "wake"  # a prefetch begins: restore it before its next request
    HIBERNATE = "hibernate"  # a job starts to drop the hot copy
    EVICTED = "evicted"  # the hot copy is gone, the cold one exists
    KEPT = "kept"  # the job ended without a change
    WOKEN = "woken"  # the KV is hot again, and no turn has come yet
    RESTORED = "restored"  # the KV is hot again, for a turn
    REFUSED = "refused"  # the engine never took the turn: nothing changed
    LOST = "lost"  # the copy on which the state relied is gone
    EXPIRE = "expire"  # forgotten on request


Kind: TypeAlias = Literal["main", "child", "task"]
S, E = State, Event
SAVING: Final[KeptReason] = "saving"
AWAY: Final = "away"

TRANSITIONS: dict[State, dict[Event, State]] = {
    S.ACTIVE: {E.TURN: S.ACTIVE, E.QUIET: S.IDLE, E.EXPIRE: S.LEAVING},
    S.IDLE: {
        E.TURN: S.ACTIVE,
        E.HIBERNATE: S.HIBERNATING,
        E.EVICTED: S.COLD,  # by the engine itself
        E.LOST: S.GONE,
        E.EXPIRE: S.GONE,
    },
    S.HIBERNATING: {
        E.TURN: S.ACTIVE,
        E.EVICTED: S.COLD,
        E.KEPT: S.IDLE,
        E.LOST: S.GONE,
        E.EXPIRE: S.GONE,
    },
    S.COLD: {
        E.TURN: S.WAKING,
        E.WAKE: S.WAKING,
        E.RESTORED: S.IDLE,  # for a turn that did not wait for it
        E.LOST: S.GONE,
        E.EXPIRE: S.GONE,
    },
    S.WAKING: {
        E.TURN: S.WAKING,
        E.KEPT: S.COLD,
        E.WOKEN: S.IDLE,
        E.RESTORED: S.ACTIVE,
        E.REFUSED: S.COLD,
        E.LOST: S.ACTIVE,  # "prefill again": the session continues
        E.EXPIRE: S.LEAVING,
    },
    S.LEAVING: {E.TURN: S.LEAVING, E.QUIET: S.LEAVING, E.LOST: S.GONE, E.EXPIRE: S.LEAVING},
    S.GONE: {},
}


class TurnHints(NamedTuple):
    """The hints that a request carries about its session."""

    parent: str | None = None  # the id of the session that started this one
    is_child: bool = False  # it works for another session, and sleeps before that one
    retain_s: float = 0.0  # keep it hot for at least this many seconds, within budgets
    is_task: bool = False  # a program's single question, no conversation: sleeps first


class IllegalTransition(Exception):
    """The table has no entry for an event in a state: a bug of ours. The message names both."""


@dataclass(slots=True)
class Session:
    """A row of the table. Times are readings of the scheduler's clock, in seconds."""

    ref: SessionRef
    state: State
    last_used: float
    listener: Listener = field(repr=False)
    began: float = float("-inf")  # its first turn here; -inf: the engine had it before
    reported_at: float = float("-inf")  # when the engine last reported it
    number: int = 0  # unique within a table
    hibernation: int = 0  # number of the newest hibernation job
    num_turns: int = 0  # that are being served now
    known: bool = False  # the engine has answered a turn of it, or reported it
    tokens: int = 0
    hot_bytes: int = 0
    cold_bytes: int = 0
    cold_tokens: int = 0  # tokens of ``cold_bytes``; fewer than ``tokens`` while it grows
    tier: TierName | None = None
    pinned: bool = False
    keep_until: float = 0.0  # not put to sleep earlier: the engine refused to release it
    parent: str | None = None
    is_child: bool = False
    is_task: bool = False  # as its latest turn was
    retain_until: float = 0.0  # its client asked to keep it until then
    num_children: int = 0  # children that are being served now
    counted_for: str | None = None  # the parent whose ``num_children`` counts this session
    saving: bool = False  # a client asked it to sleep, which it does once it is saved

    @property
    def hot(self) -> bool:
        """True while the engine holds its live KV."""
        return self.state in (S.ACTIVE, S.IDLE, S.HIBERNATING)

    @property
    def goes_with_engine(self) -> bool:
        """True if its cold copy is lost when the engine ends."""
        return self.tier is not None and not TIERS[self.tier].outlives_engine

    @property
    def kind(self) -> Kind:
        """Its use: a conversation, a helper of another session, or questions of a program."""
        return "task" if self.is_task else "child" if self.is_child else "main"

    def shown_state(self, engine_is_there: bool) -> str:
        """Return the state for readers; see above."""
        quiet = self.state in (S.IDLE, S.HIBERNATING)
        if not engine_is_there and (quiet or (self.state is S.COLD and self.goes_with_engine)):
            return AWAY
        return SAVING if self.saving and quiet else self.state.value

    def unchanged_since(self, then: float) -> bool:
        """True if no turn and no report changed it after ``then``."""
        return max(self.last_used, self.reported_at) <= then

    def can(self, event: Event) -> bool:
        """True if the event is legal in this state."""
        return event in TRANSITIONS[self.state]

    def apply(self, event: Event, why: str = "") -> State:
        """Change the state, call the listener, and return the new state.

        Args:
            why: the reason why the session leaves a place, in a word; see ``Step``.

        Raises:
            IllegalTransition: the table has no entry for this event in this state.
        """
        before, after = self.state, TRANSITIONS[self.state].get(event)
        if after is None:
            raise IllegalTransition(f"{self.ref.id!r}: {event.value} while {before.value}")
        if event is E.HIBERNATE:
            self.hibernation += 1
        self.state = after
        left = self._left(before, after)
        step = Step(before.value, event.value, after.value, self.tier, left, why if left else "")
        self.listener(self, step)
        return after

    def _left(self, before: State, after: State) -> str:
        """Return the place that loses its KV by the change, the slowest of several; "" = none."""
        was_hot = before in (S.ACTIVE, S.IDLE, S.HIBERNATING)
        if after is S.COLD:
            return "hot" if was_hot else ""
        if after is S.LEAVING or (after is S.GONE and before is not S.LEAVING):
            return (self.tier or ("hot" if was_hot else "")) if self.known else ""
        return ""

    def complete(
        self, event: Event, hibernation: int, report: SessionReport | None = None, why: str = ""
    ) -> bool:
        """Apply the end of a hibernation job; return False if a later turn made it obsolete.

        Args:
            report: the engine's report at its end.
            why: the reason why the session was put to sleep.
        """
        if self.state is not S.HIBERNATING or hibernation != self.hibernation:
            return False
        if report is not None:
            self.learn(report)
        self.apply(event, why)
        return True

    def take_hints(self, hints: TurnHints, now: float) -> None:
        """Take over a turn's hints; a shorter ``retain_s`` does not shorten a longer one."""
        if hints.parent is not None:
            self.parent = hints.parent
        self.is_child = self.is_child or hints.is_child
        self.is_task = hints.is_task
        self.retain_until = max(self.retain_until, now + hints.retain_s)

    def learn(self, report: SessionReport) -> None:
        """Take over sizes and places from the engine. Never touches the state."""
        self.known = True
        self.tokens = report.tokens
        self.hot_bytes = report.hot_bytes
        self.cold_bytes = report.cold_bytes
        self.cold_tokens = report.cold_tokens or (report.tokens if report.cold_bytes else 0)
        self.tier = report.tier
        self.pinned = report.pinned


class SessionView(msgspec.Struct, frozen=True):
    """A session as it is shown to clients."""

    id: str
    state: str
    tier: TierName | None  # slowest tier that a restore reads; None = no cold copy
    tokens: int
    bytes: int  # hot bytes while hot, packed bytes while cold
    idle_s: float
    pinned: bool
    kind: Kind
    parent: str | None
    retain_s: float  # for how much longer its client asks to keep it


def view_of(session: Session, now: float, engine_is_there: bool) -> SessionView:
    """Return the view of a row; ``now`` is a reading of the scheduler's clock."""
    state = session.shown_state(engine_is_there)
    return SessionView(
        id=session.ref.id,
        state=state,
        tier=None if state == AWAY else session.tier,
        tokens=session.tokens,
        bytes=session.hot_bytes if session.hot else session.cold_bytes,
        idle_s=0.0 if session.num_turns else round(max(0.0, now - session.last_used), 3),
        pinned=session.pinned,
        kind=session.kind,
        parent=session.parent,
        retain_s=round(max(0.0, session.retain_until - now), 3),
    )


class Observer:
    """Receives the actions of the scheduler; a subclass overrides the methods that it needs.

    Called on the event loop; must not block.
    """

    def transition(self, ref: SessionRef, step: Step) -> None:
        """A session changed state, or the tier where it sleeps; called once for every change."""

    def row_changed(self, ref: SessionRef) -> None:
        """A row of the table was added, removed or changed; may be called without a change."""

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
