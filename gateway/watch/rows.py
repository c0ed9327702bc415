"""What is shown of a session: made of its row, its past, and the requests that it has now."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence

from msgspec import UNSET

from engines.wire import KVSize, Welcome
from gateway.watch.requests import LiveRequest
from gateway.watch.shape import KVPlace, SessionStatus, Transition, TurnRecord
from scheduler.session import AWAY, Session, State, Step
from scheduler.table import SessionTable

MAX_TITLE = 60  # characters
MAX_TURNS = 20
MAX_STEPS = 60
LEAST_RATIO = 1.05  # less is no packing: exact copies have headers, and fp32 takes twice bf16
MAX_RECORDS = 150_000  # turns and steps of all sessions, some 40 MB
Key = tuple[str, str]  # tenant and id
_HOT = ("active", "idle", "hibernating")


def title_of(messages: Sequence[object]) -> str:
    """Take the first words that a user has said; "" if there are none.

    Agents put notes of their own before them, each as a text in tags.
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
    """One session's past, as this server has seen it."""

    __slots__ = ("num_turns", "place", "saved_s", "saved_tokens", "steps", "title", "turns")

    def __init__(self) -> None:
        self.place: KVPlace = ""  # of its KV, since its last step
        self.title = ""
        self.turns: deque[TurnRecord] = deque(maxlen=MAX_TURNS)
        self.steps: deque[Transition] = deque(maxlen=MAX_STEPS)
        self.num_turns = 0
        self.saved_tokens = 0
        self.saved_s: float | None = None  # until it is known of some

    @property
    def num_records(self) -> int:
        return 1 + len(self.turns) + len(self.steps)

    def step(self, shown: Transition) -> tuple[KVPlace, KVPlace]:
        """Take a step in; return where its KV was before, and where it is now."""
        before = self.place or self._place_before(shown)
        self.place = before
        if shown.after in _HOT:
            self.place = "hot"
        elif shown.after == "cold":
            self.place = shown.tier or ""
        self.steps.append(shown)
        return before, self.place

    def _place_before(self, first: Transition) -> KVPlace:
        """Say by its first step where a session was: one that was adopted is quiet then."""
        if first.before in _HOT:
            return "" if first.before == "active" else "hot"
        return first.tier or ""


class Histories:
    """The pasts of all sessions, bounded; those that were quiet for longest go first."""

    def __init__(self, wall: Callable[[], float], max_records: int = MAX_RECORDS) -> None:
        self._wall = wall
        self._max_records = max_records
        self._num_records = 0
        self._pasts: OrderedDict[Key, SessionPast] = OrderedDict()

    def of(self, key: Key) -> SessionPast | None:
        """Return a session's past; None if nothing of it is remembered."""
        return self._pasts.get(key)

    def stepped(self, key: Key, step: Step) -> tuple[KVPlace, KVPlace]:
        """Note a transition; return where the session's KV was, and where it is now."""
        past = self._open(key)
        places = past.step(_shown(step, round(self._wall(), 3)))
        self._close(past)
        return places

    def turned(self, key: Key, turn: TurnRecord, title: str = "") -> None:
        """Note a turn that is over; ``title`` is the session's from then on."""
        past = self._open(key)
        past.title = title
        past.turns.append(turn)
        past.num_turns += 1
        past.saved_tokens += turn.reused_tokens
        if turn.reused_tokens and turn.saved_s is not None:
            past.saved_s = (past.saved_s or 0.0) + turn.saved_s
        self._close(past)

    def forget(self, key: Key) -> None:
        """Drop a session's past: nothing of it is to be left."""
        past = self._pasts.pop(key, None)
        if past is not None:
            self._num_records -= past.num_records

    def _open(self, key: Key) -> SessionPast:
        past = self._pasts.pop(key, None)
        if past is None:
            past = SessionPast()
        else:
            self._num_records -= past.num_records
        self._pasts[key] = past
        return past

    def _close(self, past: SessionPast) -> None:
        self._num_records += past.num_records
        while self._num_records > self._max_records and len(self._pasts) > 1:
            _, oldest = self._pasts.popitem(last=False)
            self._num_records -= oldest.num_records


def _shown(step: Step, at: float) -> Transition:
    return Transition(at, step.before, step.event, step.after, step.tier, step.why)


class Rows:
    """Shows rows of the table. Belongs to the event loop."""

    def __init__(
        self,
        table: SessionTable,
        histories: Histories,
        serving: Callable[[Key], Collection[LiveRequest]],
        welcome: Callable[[], Welcome | None],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """
        Args:
            serving: gives the requests of a session that are not over, the latest last.
            welcome: gives the engine's account of itself; None while there is none.
            clock: the scheduler's.
        """
        self._table = table
        self._histories = histories
        self._serving = serving
        self._welcome = welcome
        self._clock = clock
        self._wall = wall
        self._live_kv: KVSize | None = None  # as the latest engine said
        self._bf16_kv: KVSize | None = None

    def session(self, key: Key) -> Session | None:
        """Find a row that may be shown; None if it is gone or leaving."""
        session = self._table.row(*key)
        return None if session is None or session.state is State.LEAVING else session

    def sessions(self, tenant: str | None) -> list[Session]:
        """List a tenant's sessions that may be shown; everybody's for None."""
        rows = self._table if tenant is None else self._table.of(tenant)
        return [x for x in rows if x.state is not State.LEAVING]

    def state(self, session: Session) -> str:
        """Return a session's state as it is shown."""
        return session.shown_state(self._welcome() is not None)

    # ---- sizes

    def tokens(self, session: Session) -> int:
        """Count a session's tokens, with those of answers that are on their way."""
        served = (x.tokens_so_far for x in self._serving(_key(session)))
        return max(session.tokens, *served, 0)

    def hot_bytes(self, session: Session) -> int | None:
        """Return the bytes of its live KV; until the engine has said, what its tokens take."""
        if session.hot_bytes and not session.num_turns:
            return session.hot_bytes
        self._look_at_engine()
        by_tokens = self._live_kv.of(self.tokens(session)) if self._live_kv else 0
        return max(session.hot_bytes, by_tokens) or None

    def bf16_bytes(self, num_tokens: int) -> int | None:
        """Return the bytes that the KV of so many tokens takes in bf16; None if not known."""
        self._look_at_engine()
        return self._bf16_kv.of(num_tokens) if self._bf16_kv else None

    def _look_at_engine(self) -> None:
        if (welcome := self._welcome()) is not None:
            self._live_kv, self._bf16_kv = welcome.live_kv, welcome.bf16_kv

    # ---- what is shown

    def shown(self, session: Session, *, admin: bool) -> SessionStatus:
        """Show a row; with its tenant for an admin."""
        key = _key(session)
        past, serving = self._histories.of(key), list(self._serving(key))
        last = past.turns[-1] if past and past.turns else None
        now = serving[-1] if serving else None
        cache = now.cache if now else None
        title = (now.title if now else "") or (past.title if past else "")
        num_tokens, in_bf16 = self.tokens(session), self.bf16_bytes(session.cold_tokens)
        state = self.state(session)
        return SessionStatus(
            id=session.ref.id,
            tenant=session.ref.tenant if admin else UNSET,
            title=title or UNSET,
            client=now.client if now else last.client if last else None,
            parent=session.parent,
            kind=session.kind,
            state=state,
            tier=None if state == AWAY else session.tier,
            tokens=num_tokens,
            bytes=self.hot_bytes(session) if session.hot else session.cold_bytes,
            cold_bytes=session.cold_bytes,
            bf16_bytes=self.bf16_bytes(num_tokens),
            ratio=_ratio(in_bf16, session.cold_bytes),
            idle_since=None if session.num_turns else self._unix(session.last_used),
            pinned=session.pinned,
            last_source=now.source if now and cache else last.source if last else None,
            last_reason=cache.reason if cache else last.reason if last else None,
            saved_tokens=past.saved_tokens if past else 0,
            saved_s=round(past.saved_s, 3) if past and past.saved_s is not None else None,
            turns=(past.num_turns if past else 0) + sum(x.in_engine for x in serving),
            retain_until=self._retained(session),
        )

    def _retained(self, session: Session) -> float | None:
        wanted = session.retain_until > self._clock()
        return self._unix(session.retain_until) if wanted else None

    def _unix(self, reading: float) -> float:
        """Turn a reading of the scheduler's clock into Unix time."""
        return round(self._wall() + reading - self._clock(), 1)


def _ratio(in_bf16: int | None, cold_bytes: int) -> float | None:
    """Return how much denser than bf16 it is packed; None if it is not."""
    if not in_bf16 or not cold_bytes or in_bf16 < LEAST_RATIO * cold_bytes:
        return None
    return round(in_bf16 / cold_bytes, 2)


def _key(session: Session) -> Key:
    return session.ref.tenant, session.ref.id
