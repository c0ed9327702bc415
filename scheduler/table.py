"""All sessions of one engine as rows: found by name, the quiet ones also in order of last use.

The table may be out of date; the engine's blocks decide. It is bounded: a row that is dropped to
make room costs its session nothing, except that the sweeps no longer put it to sleep.

Quiet rows are also in queues, in the order of their last use: one queue for each kind of job that
sweeps start. A sweep reads only the heads of the queues, so its cost does not grow with the number
of sessions that are not due.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from engines.base import SessionRef, SessionReport
from scheduler.session import Event, Observer, Session, State, Step, TurnHints

# A report may have been written before its session was forgotten, and arrive afterwards.
LATE_REPORT_S = 10.0


class Queue(enum.Enum):
    """The queues of quiet rows, in the order in which rows are dropped to make room."""

    STORED = "cold, below memory"
    PACKED = "cold, in memory"
    HOT = "hot and quiet"
    LEAVING = "forgotten, to be removed from the engine once more"
    PINNED = "quiet, and not to be moved"


class ByLastUse:
    """Rows, the longest unused first. A row's ``last_used`` must not change while it is in here."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, Session]] = []

    def __iter__(self) -> Iterator[Session]:
        return (session for _, _, session in self._rows)

    def add(self, session: Session) -> None:
        insort(self._rows, (session.last_used, session.number, session))

    def remove(self, session: Session) -> None:
        at = bisect_left(self._rows, (session.last_used, session.number))
        assert self._rows[at][2] is session, "last_used was changed in the queue"
        del self._rows[at]


class SessionTable:
    """Rows by tenant and id. Listens to ``Session.apply``, the only thing that changes a state."""

    def __init__(self, max_rows: int, clock: Callable[[], float], observer: Observer) -> None:
        self._max_rows = max_rows
        self._clock = clock
        self._observer = observer
        self._rows: dict[str, dict[str, Session]] = {}
        self._num_rows = 0
        self._numbers = 0
        self._queues = {queue: ByLastUse() for queue in Queue}
        self._queue_of: dict[int, Queue] = {}  # by the number of the row
        self._forgotten: dict[tuple[str, str], float] = {}  # stale until; the oldest first
        self._children: Counter[tuple[str, str]] = Counter()  # being served, by parent

    def __len__(self) -> int:
        return self._num_rows

    def __iter__(self) -> Iterator[Session]:
        """Iterate over every row; no other method here takes time in proportion to the table."""
        return (session for rows in self._rows.values() for session in rows.values())

    def row(self, tenant: str, id: str) -> Session | None:
        """Find a row by name."""
        return self._rows.get(tenant, {}).get(id)

    def of(self, tenant: str) -> list[Session]:
        """List a tenant's rows."""
        return list(self._rows.get(tenant, {}).values())

    def queue(self, queue: Queue) -> Iterator[Session]:
        """Iterate over a queue, the longest unused first. No row may change meanwhile."""
        return iter(self._queues[queue])

    # ---- changes of rows

    def add(
        self,
        ref: SessionRef,
        state: State,
        last_used: float,
        report: SessionReport | None = None,
    ) -> Session:
        """Add a row; ``report`` is the engine's report of it, if there is one already."""
        if self._num_rows >= self._max_rows:
            self._make_room()
        self._numbers += 1
        session = Session(
            ref=ref,
            state=state,
            last_used=last_used,
            listener=self._state_changed,
            number=self._numbers,
            num_children=self._children[ref.tenant, ref.id],
        )
        if report is not None:
            session.learn(report)
            session.reported_at = self._clock()
        self._rows.setdefault(ref.tenant, {})[ref.id] = session
        self._num_rows += 1
        self._requeue(session)
        return session

    def begin(
        self, ref: SessionRef, hints: TurnHints | None = None, event: Event = Event.TURN
    ) -> Session:
        """Begin a turn and return its row, made if need be; ``Event.WAKE`` begins a prefetch."""
        session = self.row(ref.tenant, ref.id)
        if session is None:
            session = self.add(ref, State.ACTIVE, self._clock())
            session.num_turns = 1
            session.began = session.last_used
        else:
            session.num_turns += 1  # before ``apply``: takes a leaving row out of its queue
            session.apply(event)
        session.saving = False
        session.last_used = self._clock()  # the row is in no queue now
        if hints is not None:
            session.take_hints(hints, session.last_used)
            self._observer.row_changed(session.ref)
        if session.num_turns == 1:
            self._count_child(session, 1)
        return session

    def end(self, session: Session, asleep: Event = Event.REFUSED) -> None:
        """End a turn or a prefetch, with any outcome.

        Args:
            asleep: the event to apply if the session is still waking and has no other turn.
        """
        session.num_turns -= 1
        session.last_used = self._clock()
        if session.num_turns > 0:
            return
        self._count_child(session, -1)
        session.apply(asleep if session.state is State.WAKING else Event.QUIET)
        if not session.known and session.can(Event.LOST):  # refused turns leave no row
            session.apply(Event.LOST)

    def _count_child(self, session: Session, by: int) -> None:
        """Count one child more, or one fewer, as being served for the parent of a session."""
        if session.counted_for is None and by > 0:
            session.counted_for = session.parent
        if session.counted_for is None:
            return
        key = (session.ref.tenant, session.counted_for)
        self._children[key] += by
        if by < 0:
            session.counted_for = None
        parent = self.row(*key)
        if parent is not None:
            parent.num_children = self._children[key]
        if not self._children[key]:
            del self._children[key]

    def learn(self, session: Session, report: SessionReport) -> None:
        """Take over sizes and tier from a report, but not the state."""
        session.learn(report)
        session.reported_at = self._clock()
        self._requeue(session)

    def take(self, session: Session, report: SessionReport | None, why: str = "") -> None:
        """Apply the engine's report to the row; it also sets the state of a quiet session.

        Args:
            report: None if the engine does not know the session.
            why: the reason, if a copy is gone, in a word; see ``scheduler.session.Step``.
        """
        held_by = session.tier
        if report is not None:
            # Observers are given the tier from which a session was lost.
            gone = session.state is State.COLD and not (report.hot or report.tier)
            self.learn(session, msgspec.structs.replace(report, tier=held_by) if gone else report)
        if session.state not in (State.IDLE, State.COLD):
            return
        if report is None or not (report.hot or report.tier):
            session.apply(Event.LOST, why)
        elif session.state is State.IDLE and not report.hot:
            session.apply(Event.EVICTED, why)
        elif session.state is State.COLD and report.hot:
            session.apply(Event.RESTORED)
        elif session.state is State.COLD and held_by and session.tier != held_by:
            step = Step("cold", "moved", "cold", session.tier, held_by, why)
            self._observer.transition(session.ref, step)

    # ---- forgotten sessions

    @contextmanager
    def forgetting(self, ref: SessionRef) -> Iterator[None]:
        """Let no report add the session again, in this context and ``LATE_REPORT_S`` after it."""
        self._remember_forgotten(ref)
        try:
            yield
        finally:
            self._remember_forgotten(ref)

    def was_forgotten(self, tenant: str, id: str) -> bool:
        """True if the session was deleted so recently that a report of it is stale."""
        return self._clock() < self._forgotten.get((tenant, id), 0.0)

    def _remember_forgotten(self, ref: SessionRef) -> None:
        now = self._clock()
        self._forgotten.pop((ref.tenant, ref.id), None)
        self._forgotten[ref.tenant, ref.id] = now + LATE_REPORT_S
        while (oldest := next(iter(self._forgotten))) and self._forgotten[oldest] < now:
            del self._forgotten[oldest]

    # ---- queues

    def _state_changed(self, session: Session, step: Step) -> None:
        self._observer.transition(session.ref, step)
        if session.state is State.GONE:
            self._drop(session)
        self._requeue(session)

    def _make_room(self) -> None:
        for queue in Queue:
            longest_unused = next(self.queue(queue), None)
            if longest_unused is not None:
                self._drop(longest_unused)
                return

    def _drop(self, session: Session) -> None:
        if not self._holds(session):
            return
        rows = self._rows[session.ref.tenant]
        del rows[session.ref.id]
        if not rows:
            del self._rows[session.ref.tenant]
        self._num_rows -= 1
        self._requeue(session)

    def _holds(self, session: Session) -> bool:
        return self.row(session.ref.tenant, session.ref.id) is session

    def _requeue(self, session: Session) -> None:
        """Put the row into the queue where it belongs now, if any; called after every change."""
        self._observer.row_changed(session.ref)
        old = self._queue_of.get(session.number)
        new = _queue_for(session) if self._holds(session) else None
        if new is old:
            return
        if old is not None:
            self._queues[old].remove(session)
            del self._queue_of[session.number]
        if new is not None:
            self._queues[new].add(session)
            self._queue_of[session.number] = new


def _queue_for(session: Session) -> Queue | None:
    if session.state is State.LEAVING:
        return None if session.num_turns else Queue.LEAVING
    if session.state not in (State.IDLE, State.COLD):
        return None
    if session.pinned:
        return Queue.PINNED
    if session.state is State.IDLE:
        return Queue.HOT
    return Queue.PACKED if session.goes_with_engine else Queue.STORED
