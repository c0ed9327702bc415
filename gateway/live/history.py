"""Remembers each session's past: its last turns, its steps, where it was, what it was spared."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from gateway.live.shape import Place, TransitionShown, TurnShown
from scheduler.observer import Step

MAX_TITLE = 60  # characters
MAX_TURNS = 20
MAX_STEPS = 60
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


class Past:
    """One session's past, as this server has seen it."""

    __slots__ = ("num_turns", "place", "saved_s", "steps", "title", "turns")

    def __init__(self) -> None:
        self.place: Place = ""  # of its KV, since its last step
        self.title = ""
        self.turns: deque[TurnShown] = deque(maxlen=MAX_TURNS)
        self.steps: deque[TransitionShown] = deque(maxlen=MAX_STEPS)
        self.num_turns = 0
        self.saved_s = 0.0

    @property
    def num_records(self) -> int:
        return 1 + len(self.turns) + len(self.steps)

    def step(self, shown: TransitionShown) -> tuple[Place, Place]:
        """Take a step in; return where its KV was before, and where it is now."""
        before = self.place or self._place_before(shown)
        self.place = before
        if shown.after in _HOT:
            self.place = "hot"
        elif shown.after == "cold":
            self.place = shown.tier or ""
        self.steps.append(shown)
        return before, self.place

    def _place_before(self, first: TransitionShown) -> Place:
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
        self._pasts: OrderedDict[Key, Past] = OrderedDict()

    def of(self, key: Key) -> Past | None:
        """Return a session's past; None if nothing of it is remembered."""
        return self._pasts.get(key)

    def stepped(self, key: Key, step: Step) -> tuple[Place, Place]:
        """Note a transition; return where the session's KV was, and where it is now."""
        past = self._open(key)
        places = past.step(_shown(step, round(self._wall(), 3)))
        self._close(past)
        return places

    def turned(self, key: Key, turn: TurnShown, title: str = "") -> None:
        """Note a turn that is over; ``title`` is the session's from then on."""
        past = self._open(key)
        past.title = title
        past.turns.append(turn)
        past.num_turns += 1
        past.saved_s += turn.saved_s or 0.0
        self._close(past)

    def forget(self, key: Key) -> None:
        """Drop a session's past: nothing of it is to be left."""
        past = self._pasts.pop(key, None)
        if past is not None:
            self._num_records -= past.num_records

    def _open(self, key: Key) -> Past:
        past = self._pasts.pop(key, None)
        if past is None:
            past = Past()
        else:
            self._num_records -= past.num_records
        self._pasts[key] = past
        return past

    def _close(self, past: Past) -> None:
        self._num_records += past.num_records
        while self._num_records > self._max_records and len(self._pasts) > 1:
            _, oldest = self._pasts.popitem(last=False)
            self._num_records -= oldest.num_records


def _shown(step: Step, at: float) -> TransitionShown:
    return TransitionShown(at, step.before, step.event, step.after, step.tier, step.why)
