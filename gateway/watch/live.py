"""Records what happens to the requests and sessions of one model.

Each turn has one record, a ``LiveRequest``. When the turn is over, it is added to the metrics, to
the sums (``tally``) and to its session's history. ``snapshots`` shows all these to readers. Without
readers the cost is a few sums, and a bounded history of each session.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from msgspec import UNSET

from engines.base import Engine, EngineReport, SessionRef
from engines.wire import CodecReport, Welcome
from gateway.watch.metrics import Metrics
from gateway.watch.requests import LiveRequest
from gateway.watch.shape import CodecVerdict, KVPlace, Move, Transition, TurnRecord
from gateway.watch.tally import PrefillSpeed, Tallies
from scheduler.session import Observer, Session, State, Step
from scheduler.sessions import SessionManager

MAX_TITLE = 60  # characters
MAX_TURNS = 20
MAX_STEPS = 60
MAX_RECORDS = 150_000  # turns and steps of all sessions, some 40 MB
MAX_VERDICTS = 20
Key = tuple[str, str]  # tenant and id
_HOT = ("active", "idle", "hibernating")


def title_of(messages: Sequence[object]) -> str:
    """Return the first words of the user, as a session's title; "" if there are none.

    Texts in tags are skipped, since agents put notes of their own there.
    """
    for message in messages:
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str) and (title := _first_words(text)):
                return title
    return ""


def _first_words(text: str) -> str:
    start = " ".join(text[: 20 * MAX_TITLE].split())
    if start.startswith("<"):
        return ""
    words = "".join(x for x in start if x.isprintable())
    if len(words) <= MAX_TITLE:
        return words
    return words[: MAX_TITLE - 1].rstrip() + "…"


class SessionPast:
    """One session's history, as far as this server has seen it."""

    __slots__ = ("num_turns", "place", "saved_s", "saved_tokens", "steps", "title", "turns")

    def __init__(self) -> None:
        self.place: KVPlace = ""  # of its KV, after the last step
        self.title = ""
        self.turns: deque[TurnRecord] = deque(maxlen=MAX_TURNS)
        self.steps: deque[Transition] = deque(maxlen=MAX_STEPS)
        self.num_turns = 0
        self.saved_tokens = 0
        self.saved_s: float | None = None  # None until it is known of a turn

    @property
    def num_records(self) -> int:
        return 1 + len(self.turns) + len(self.steps)

    def step(self, step: Transition) -> tuple[KVPlace, KVPlace]:
        """Add a step; return where the session's KV was before, and where it is now."""
        before = self.place or _place_before(step)
        self.place = before
        if step.after in _HOT:
            self.place = "hot"
        elif step.after == "cold":
            self.place = step.tier or ""
        self.steps.append(step)
        return before, self.place


def _place_before(first: Transition) -> KVPlace:
    """Return where a session's KV was before its first known step; "" if it had none.

    A session that was adopted from an engine or a tier is not active at its first step.
    """
    if first.before in _HOT:
        return "" if first.before == "active" else "hot"
    return first.tier or ""


class Histories:
    """The histories of all sessions, bounded; those quiet for longest are dropped first."""

    def __init__(self, wall: Callable[[], float], max_records: int = MAX_RECORDS) -> None:
        self._wall = wall
        self._max_records = max_records
        self._num_records = 0
        self._pasts: OrderedDict[Key, SessionPast] = OrderedDict()

    def of(self, key: Key) -> SessionPast | None:
        """Return a session's history; None if it is not remembered."""
        return self._pasts.get(key)

    def stepped(self, key: Key, step: Step) -> tuple[KVPlace, KVPlace]:
        """Note a transition; return where the session's KV was, and where it is now."""
        past, at = self._open(key), round(self._wall(), 3)
        places = past.step(Transition(at, step.before, step.event, step.after, step.tier, step.why))
        self._close(past)
        return places

    def turned(self, key: Key, turn: TurnRecord, title: str = "") -> None:
        """Add a turn that is over; ``title`` becomes the session's."""
        past = self._open(key)
        past.title = title
        past.turns.append(turn)
        past.num_turns += 1
        past.saved_tokens += turn.reused_tokens
        if turn.reused_tokens and turn.saved_s is not None:
            past.saved_s = (past.saved_s or 0.0) + turn.saved_s
        self._close(past)

    def forget(self, key: Key) -> None:
        """Drop a session's history."""
        past = self._pasts.pop(key, None)
        if past is not None:
            self._num_records -= past.num_records

    def _open(self, key: Key) -> SessionPast:
        past = self.of(key) or SessionPast()
        self.forget(key)
        self._pasts[key] = past
        return past

    def _close(self, past: SessionPast) -> None:
        self._num_records += past.num_records
        while self._num_records > self._max_records and len(self._pasts) > 1:
            self.forget(next(iter(self._pasts)))


class Verdicts:
    """The latest ``MAX_VERDICTS`` verdicts of the quality gate, with their times."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._last: tuple[object, ...] | None = None
        self._known: deque[CodecVerdict] = deque(maxlen=MAX_VERDICTS)

    def note(self, codec: CodecReport | None) -> list[CodecVerdict]:
        """Add the verdict of the engine's report if it is a new one; return all known ones."""
        if codec is None or not codec.id:
            return list(self._known)
        verdict = (codec.id, codec.why, codec.unmeasured)
        if verdict != self._last:
            self._last = verdict
            self._known.append(
                CodecVerdict(
                    at=round(self._wall(), 1),
                    codec=codec.id,
                    why=codec.why,
                    measured=not codec.unmeasured,
                    worst_kl=max((x.kl for x in codec.rows), default=None),
                )
            )
        return list(self._known)


class Live(Observer):
    """The records of one model. Runs on the event loop."""

    def __init__(
        self,
        engine: Engine,
        sessions: SessionManager,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            clock: the scheduler's clock, in seconds.
            wall: returns Unix time.
        """
        self.engine = engine
        self.sessions = sessions
        self.clock = clock
        self.wall = wall
        self.speed = PrefillSpeed()
        self.tallies = Tallies(wall)
        self.histories = Histories(wall)
        self.verdicts = Verdicts(wall)
        self.report: EngineReport | None = None  # the latest
        self.reported_at = float("-inf")
        self.draining = False  # the server is shutting down
        self._metrics = metrics
        self._serving: dict[Key, list[LiveRequest]] = {}  # the latest last
        self._num_moves = 0
        self._last_welcome: Welcome | None = None  # of the engine that was ready last
        sessions.observe(self)

    # ---- requests

    @contextmanager
    def request(
        self, ref: SessionRef, id: str, operation: str, client: str
    ) -> Iterator[LiveRequest]:
        """Record a request inside the context; at its end it is added to its session's history."""
        model = self.engine.welcome.model if self.engine.welcome else ""
        key, at = (ref.tenant, ref.id), self.wall()
        request = LiveRequest(ref, id, operation, client, at, self.clock, model)
        session = self.row(key)
        request.is_first = session is None or not session.known
        self._serving.setdefault(key, []).append(request)
        try:
            yield request
        finally:
            self.count(request)
            self._serving[key].remove(request)
            if not self._serving[key]:
                del self._serving[key]
            self._take(request, key)

    def count(self, request: LiveRequest) -> None:
        """Add those tokens of a request to the sums that came since the last call."""
        for stretch in request.uncounted():
            for tally in self.tallies.counting(request.ref.tenant):
                tally.count(stretch)

    def _take(self, request: LiveRequest, key: Key) -> None:
        saved_s: float | None = None
        if request.in_engine:  # False: it was refused, or its client left
            self.speed.learn(request, self.engine.codec)
            saved_s = self.speed.saved_s(request)
            turn = request.turn(saved_s)
            for tally in self.tallies.counting(request.ref.tenant):
                tally.add(turn)
            if self.row(key) is not None:
                self.histories.turned(key, turn, request.title)
        self._metrics.turn_ended(request, saved_s)

    def served(self, key: Key) -> Sequence[LiveRequest]:
        """Return the running requests of a session, the latest last."""
        return self._serving.get(key, ())

    def requests(self, tenant: str | None = None) -> list[LiveRequest]:
        """Return the running requests of a tenant, or of all (None), the oldest first."""
        each = (x for served in self._serving.values() for x in served)
        found = [x for x in each if tenant is None or x.ref.tenant == tenant]
        return sorted(found, key=lambda x: x.at)

    # ---- reports of the scheduler

    def transition(self, ref: SessionRef, step: Step) -> None:
        key = (ref.tenant, ref.id)
        if step.left:
            for tally in self.tallies.counting(ref.tenant):
                tally.departures[step.left][step.why] += 1
        if step.after in ("gone", "leaving"):
            self.histories.forget(key)
            return
        before, after = self.histories.stepped(key, step)
        if before != after:
            self._moved(key, step, before, after)

    def _moved(self, key: Key, step: Step, before: KVPlace, after: KVPlace) -> None:
        session = self.row(key)
        if session is None or not session.known:  # the engine refused its first turn
            return
        self._num_moves += 1
        hot_bytes = self.hot_bytes(session)
        moved = Move(
            number=self._num_moves,
            at=round(self.wall(), 3),
            id=session.ref.id,
            tenant=session.ref.tenant,
            before=before,
            after=after,
            event=step.event,
            why=step.why,
            tokens=session.tokens,
            bytes=hot_bytes if after == "hot" else session.cold_bytes,
            bf16_bytes=self.bf16_bytes(session.tokens),
        )
        everybodys, own = self.tallies.counting(session.ref.tenant)
        everybodys.moves.append(moved)
        own.moves.append(msgspec.structs.replace(moved, tenant=UNSET))

    def engine_reported(self, report: EngineReport) -> None:
        self.report = report
        self.reported_at = self.clock()
        self.verdicts.note(self.engine.codec)
        reported = {(x.tenant, x.session): x for x in report.requests}
        for key, served in self._serving.items():
            for request in served:
                request.progress = reported.get(key, request.progress)

    # ---- sessions

    def row(self, key: Key) -> Session | None:
        """Return a session; None if it is gone or leaving."""
        session = self.sessions.table.row(*key)
        return None if session is None or session.state is State.LEAVING else session

    def rows(self, tenant: str | None) -> list[Session]:
        """Return the sessions of a tenant, or of all (None), without those that are leaving."""
        table = self.sessions.table
        rows = table if tenant is None else table.of(tenant)
        return [x for x in rows if x.state is not State.LEAVING]

    def title(self, tenant: str, id: str) -> str:
        """Return a session's title; "" if it has none, or titles are not kept."""
        past = self.histories.of((tenant, id))
        return past.title if past else ""

    def tokens(self, session: Session) -> int:
        """Return a session's number of tokens, including answers in progress."""
        served = (x.tokens_so_far for x in self.served((session.ref.tenant, session.ref.id)))
        return max(session.tokens, *served, 0)

    def hot_bytes(self, session: Session) -> int | None:
        """Return the bytes of a session's live KV, estimated from its tokens during a turn.

        None if neither the engine has reported them nor the estimate is possible.
        """
        if session.hot_bytes and not session.num_turns:
            return session.hot_bytes
        kv = welcome.live_kv if (welcome := self._latest_welcome()) else None
        return max(session.hot_bytes, kv.of(self.tokens(session)) if kv else 0) or None

    def bf16_bytes(self, num_tokens: int) -> int | None:
        """Return the bytes of the KV of ``num_tokens`` tokens in bf16; None if not known."""
        kv = welcome.bf16_kv if (welcome := self._latest_welcome()) else None
        return kv.of(num_tokens) if kv else None

    def _latest_welcome(self) -> Welcome | None:
        self._last_welcome = self.engine.welcome or self._last_welcome
        return self._last_welcome
