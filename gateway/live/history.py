"""Remembers each session's past: its last turns, its steps, and what it was spared."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from gateway.live.shape import TransitionShown, TurnShown
from scheduler.observer import Step

MAX_TURNS = 20
MAX_STEPS = 60
MAX_RECORDS = 150_000  # turns and steps of all sessions, some 40 MB
Key = tuple[str, str]  # tenant and id


class Past:
    """One session's past, as this server has seen it."""

    __slots__ = ("num_turns", "saved_s", "steps", "turns")

    def __init__(self) -> None:
        self.turns: deque[TurnShown] = deque(maxlen=MAX_TURNS)
        self.steps: deque[TransitionShown] = deque(maxlen=MAX_STEPS)
        self.num_turns = 0
        self.saved_s = 0.0

    @property
    def num_records(self) -> int:
        return 1 + len(self.turns) + len(self.steps)


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

    def stepped(self, key: Key, step: Step) -> None:
        """Note a transition."""
        past = self._open(key)
        past.steps.append(_shown(step, round(self._wall(), 3)))
        self._close(past)

    def turned(self, key: Key, turn: TurnShown) -> None:
        """Note a turn that is over."""
        past = self._open(key)
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
