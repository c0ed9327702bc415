"""Adds up what turns used and were spared: today, over the last hour, over the last seconds."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Final

from engines.wire import CodecReport
from gateway.watch.requests import FIRST, LiveRequest, Stretch, TokenKind
from gateway.watch.shape import MAX_MOVES, FirstTokenTimes, Move, TurnKind, TurnRecord

LATEST_TURNS: Final = 500  # over which times are shown

RATE_S = 10.0
LEAST_RATE_S = 1.0  # a shorter time depends more on one step of the engine than on its speed
STEP_S = 10  # of the last hour
HOUR_S = 3600
DAY_S = 86_400
MAX_TENANTS = 1000  # whose sums are kept: a key may have any number of users
_INSTANT_S = 1e-3


class PrefillSpeed:
    """The engine's speed of prefill, measured on turns whose first token was seen."""

    LEAST_TOKENS = 64  # shorter prompts depend more on the step than on the speed

    def __init__(self) -> None:
        self._reported: float | None = None  # by the engine, from when its codecs were measured
        self._seen: float | None = None

    def learn(self, request: LiveRequest, codec: CodecReport | None = None) -> None:
        """Learn from a turn. One that was restored counts less: unpacking took some of its time.

        ``codec``: the engine's report, which has times of prefills.
        """
        timed = [x.prefill_s for x in codec.rows if x.prefill_s] if codec else []
        self._reported = 1000 / max(timed) if timed else None
        computed, took_s = request.prefill_seen
        if took_s <= 0 or computed < self.LEAST_TOKENS:
            return
        if request.reused_tokens > computed:
            return
        now, before = computed / took_s, self._seen
        self._seen = now if before is None else 0.8 * before + 0.2 * now

    @property
    def tokens_per_s(self) -> float | None:
        """The speed on turns, else as the engine measured it for its codecs; None if neither is."""
        return self._seen or self._reported

    def saved_s(self, request: LiveRequest) -> float | None:
        """Estimate the seconds that a prefill of the reused tokens would have taken longer.

        What restoring took is taken off, as far as it is known; None while no speed is known.
        """
        if not request.reused_tokens:
            return 0.0
        if self.tokens_per_s is None:
            return None
        spared_s = request.reused_tokens / self.tokens_per_s
        computed, took_s = request.computed_tokens, request.prefill_s
        restored = request.cache is not None and request.cache.source != "hot"
        if restored and computed is not None and took_s is not None:
            spared_s -= max(0.0, took_s - computed / self.tokens_per_s)
        return max(0.0, spared_s)


class Buckets:
    """Tokens by the time at which they came, in buckets of one width; the latest of them."""

    def __init__(self, width_s: int, most: int) -> None:
        self._width_s = width_s
        self._most = most
        self._tokens: dict[int, float] = {}  # by number, which is time over width

    def add(self, begin: float, end: float, num_tokens: int) -> None:
        """Spread tokens evenly over the time between two moments."""
        last = int(end // self._width_s)
        first = int(begin // self._width_s)
        per_s = num_tokens / (end - begin)
        for number in range(max(first, last - self._most), last + 1):
            common = min(end, (number + 1) * self._width_s) - max(begin, number * self._width_s)
            self._tokens[number] = self._tokens.get(number, 0.0) + per_s * common
        if len(self._tokens) > 2 * self._most:
            oldest = last - self._most
            self._tokens = {n: tokens for n, tokens in self._tokens.items() if n >= oldest}

    def of(self, number: int) -> float:
        """Return the tokens of a bucket."""
        return self._tokens.get(number, 0.0)

    def since(self, moment: float) -> float:
        """Add up all that came after a moment."""
        first = int(moment // self._width_s)
        rest = 1 - (moment / self._width_s - first)  # of the bucket in which it lies
        later = sum(tokens for number, tokens in self._tokens.items() if number > first)
        return later + rest * self.of(first)


class Pace:
    """Tokens of one kind, of one tenant or of all: how many a second now, and in the last hour.

    Tokens that came between two moments are spread evenly over the time between them. So it does
    not matter how often it is read, or whether it is read at all.
    """

    def __init__(self) -> None:
        self._recent = Buckets(1, int(RATE_S) + 1)
        self._hour = Buckets(STEP_S, HOUR_S // STEP_S)
        self._began = self._ended = float("-inf")  # of work without a pause of ``RATE_S``

    def add(self, begin: float, end: float, num_tokens: int) -> None:
        """Count tokens, not long after they came."""
        begin = min(begin, end - _INSTANT_S)
        if begin > self._ended + RATE_S or begin < self._began:
            self._began = begin
        self._ended = max(self._ended, end)
        self._recent.add(begin, end, num_tokens)
        self._hour.add(begin, end, num_tokens)

    def rate(self, now: float) -> float:
        """Return tokens a second over the last ``RATE_S``, or since work began if that is less."""
        if now - self._ended >= RATE_S:
            return 0.0
        over_s = now - self._began
        if over_s < RATE_S:  # before it there was nothing: its first bucket is its own
            return round(self._recent.since(int(self._began)) / max(LEAST_RATE_S, over_s), 1)
        return round(self._recent.since(now - RATE_S) / RATE_S, 1)

    def in_hour(self, now: float) -> float:
        """Return the tokens of the last hour; it begins with a step."""
        return self._hour.since(now // STEP_S * STEP_S - HOUR_S)

    def hour(self, first: int, until: int) -> list[float]:
        """Return the rates of steps, by their numbers."""
        return [round(self._hour.of(number) / STEP_S, 1) for number in range(first, until)]


def first_token_times(latest: Collection[tuple[float, int]]) -> FirstTokenTimes:
    """Return the median and the 95th percentile of times, each with the length of its prompt."""
    seconds = [x for x, _ in latest]
    return FirstTokenTimes(
        turns=len(seconds),
        p50_s=round(statistics.median(seconds), 3),
        p95_s=round(p95(seconds), 3),
        prompt_tokens=round(statistics.median(x for _, x in latest)),
    )


def p95(values: Collection[float]) -> float:
    """Return the 95th percentile of at least one value: one that was seen, never less."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]


def kind_of(source: str) -> TurnKind:
    """Return the kind of a turn by ``LiveRequest.source``."""
    if source.startswith("cold"):
        return "restored"
    return "first" if source == FIRST else "hot" if source == "hot" else "missed"


class Tally:
    """One tenant's sums, or everybody's."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._day = int(wall() // DAY_S)
        self._saved_tokens = self._turns = 0
        self._saved_s: float | None = None  # until it is known of some
        self.paces: Mapping[TokenKind, Pace] = {"computed": Pace(), "answered": Pace()}
        self._first_tokens: dict[TurnKind, deque[tuple[float, int]]] = {}
        self._waits: deque[float] = deque(maxlen=LATEST_TURNS)
        self.moves: deque[Move] = deque(maxlen=MAX_MOVES)
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.departures: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, turn: TurnRecord) -> None:
        """Count a turn that is over."""
        self._turn_day()
        self._turns += 1
        self._waits.append(turn.waited_s)
        self._saved_tokens += turn.reused_tokens
        if turn.reused_tokens and turn.saved_s is not None:
            self._saved_s = (self._saved_s or 0.0) + turn.saved_s
        if turn.source is None:
            return
        self.outcomes[turn.source][turn.reason or ""] += 1
        if turn.first_token_s is not None:
            latest = self._first_tokens.setdefault(kind_of(turn.source), deque(maxlen=LATEST_TURNS))
            latest.append((turn.first_token_s, turn.prompt_tokens or 0))

    def count(self, stretch: Stretch) -> None:
        """Count tokens when they came."""
        self.paces[stretch.kind].add(stretch.begin, stretch.end, stretch.num_tokens)

    def first_tokens(self) -> dict[TurnKind, FirstTokenTimes]:
        """Return the times to first token of the latest streams of each kind that was seen."""
        return {kind: first_token_times(seen) for kind, seen in self._first_tokens.items()}

    @property
    def wait_p95_s(self) -> float | None:
        """The 95th percentile of the latest turns' time in the gateway's line."""
        return round(p95(self._waits), 3) if self._waits else None

    def tokens_last_hour(self, now: float) -> int:
        """Count the tokens that were computed in the last hour, of prompts and answers."""
        return round(sum(x.in_hour(now) for x in self.paces.values()))

    def hour(self, now: float, started: float) -> tuple[float, list[float], list[float]]:
        """Return when the last hour's first step began, and each step's rates, of both kinds."""
        until = int(now // STEP_S)
        first = min(until, max(int(started // STEP_S), until - HOUR_S // STEP_S))
        prompts, answers = (x.hour(first, until) for x in self.paces.values())
        return first * STEP_S, prompts, answers

    @property
    def today(self) -> tuple[int, float | None, int]:
        """Tokens and seconds that were spared since midnight UTC, and the turns."""
        self._turn_day()
        saved_s = None if self._saved_s is None else round(self._saved_s, 3)
        return self._saved_tokens, saved_s, self._turns

    def _turn_day(self) -> None:
        day = int(self._wall() // DAY_S)
        if day != self._day:
            self._day, self._saved_tokens, self._saved_s, self._turns = day, 0, None, 0


class Tallies:
    """The sums of each tenant, and everybody's; those not counted in for longest go."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._everybody, self._none = Tally(wall), Tally(wall)
        self._of: dict[str, Tally] = {}

    def names(self) -> set[str]:
        """Return the tenants that have sums."""
        return set(self._of)

    def counting(self, tenant: str) -> tuple[Tally, Tally]:
        """Return what is counted in for a tenant: everybody's sums and its own."""
        own = self._of.pop(tenant, None) or Tally(self._wall)
        self._of[tenant] = own
        if len(self._of) > MAX_TENANTS:
            del self._of[next(iter(self._of))]
        return self._everybody, own

    def shown(self, tenant: str | None) -> Tally:
        """Return the sums for a reader; None: all tenants'. Without any, empty ones."""
        return self._everybody if tenant is None else self._of.get(tenant, self._none)
