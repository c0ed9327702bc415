"""Sums of the tokens and times that turns used and saved: today, in the last hour, and now."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Final

from engines.wire import CodecReport
from gateway.watch.requests import FIRST, LiveRequest, Stretch, TokenKind
from gateway.watch.shape import MAX_MOVES, FirstTokenTimes, Move, TurnKind, TurnRecord

LATEST_TURNS: Final = 500  # over which percentiles of times are taken

RATE_S = 10.0
LEAST_RATE_S = 1.0  # over a shorter time, single steps of the engine would dominate a rate
STEP_S = 10  # the length of a step of the last hour
HOUR_S = 3600
DAY_S = 86_400
MAX_TENANTS = 1000  # whose sums are kept: a key may have any number of users
_INSTANT_S = 1e-3


class PrefillSpeed:
    """The engine's speed of prefill, measured on turns whose first token was seen."""

    LEAST_TOKENS = 64  # with fewer, the fixed time of a step would dominate

    def __init__(self) -> None:
        self._reported: float | None = None  # tokens/s, from the engine's measurement of codecs
        self._seen: float | None = None  # tokens/s, the moving mean over turns

    def learn(self, request: LiveRequest, codec: CodecReport | None = None) -> None:
        """Update the speed by a turn, unless more of its prompt was reused than computed.

        ``codec``: the engine's report, which has measured times of prefills.
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
        """The speed on turns, else that of the engine's measurement; None if neither is known."""
        return self._seen or self._reported

    def saved_s(self, request: LiveRequest) -> float | None:
        """Estimate the seconds of prefill that a request's reused tokens have saved.

        The time that restoring took is subtracted if it is known. None while no speed is known.
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
        """Add tokens, spread evenly over the time from ``begin`` to ``end``."""
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
        """Return the tokens of the bucket with this number."""
        return self._tokens.get(number, 0.0)

    def since(self, moment: float) -> float:
        """Return the tokens since a time."""
        first = int(moment // self._width_s)
        rest = 1 - (moment / self._width_s - first)  # of the bucket in which it lies
        later = sum(tokens for number, tokens in self._tokens.items() if number > first)
        return later + rest * self.of(first)


class Pace:
    """The rates of one kind of tokens, of one tenant or of all, now and in the last hour.

    Tokens are spread evenly over the time in which they came, so that the rates do not depend on
    when they are read.
    """

    def __init__(self) -> None:
        self._recent = Buckets(1, int(RATE_S) + 1)
        self._hour = Buckets(STEP_S, HOUR_S // STEP_S)
        self._began = self._ended = float("-inf")  # of the last work without a pause of ``RATE_S``

    def add(self, begin: float, end: float, num_tokens: int) -> None:
        """Count tokens that came from ``begin`` to ``end``, shortly after they came."""
        begin = min(begin, end - _INSTANT_S)
        if begin > self._ended + RATE_S or begin < self._began:
            self._began = begin
        self._ended = max(self._ended, end)
        self._recent.add(begin, end, num_tokens)
        self._hour.add(begin, end, num_tokens)

    def rate(self, now: float) -> float:
        """Return tokens per second over the last ``RATE_S``, or since work began if later."""
        if now - self._ended >= RATE_S:
            return 0.0
        over_s = now - self._began
        if over_s < RATE_S:  # the first bucket is counted whole, as there was no work before
            return round(self._recent.since(int(self._began)) / max(LEAST_RATE_S, over_s), 1)
        return round(self._recent.since(now - RATE_S) / RATE_S, 1)

    def in_hour(self, now: float) -> float:
        """Return the tokens of the last hour, counted from the beginning of a step."""
        return self._hour.since(now // STEP_S * STEP_S - HOUR_S)

    def hour(self, first: int, until: int) -> list[float]:
        """Return the tokens per second of the steps ``first`` to ``until`` - 1."""
        return [round(self._hour.of(number) / STEP_S, 1) for number in range(first, until)]


def first_token_times(latest: Collection[tuple[float, int]]) -> FirstTokenTimes:
    """Return percentiles of first-token times; ``latest``: pairs of seconds and prompt tokens."""
    seconds = [x for x, _ in latest]
    return FirstTokenTimes(
        turns=len(seconds),
        p50_s=round(statistics.median(seconds), 3),
        p95_s=round(p95(seconds), 3),
        prompt_tokens=round(statistics.median(x for _, x in latest)),
    )


def p95(values: Collection[float]) -> float:
    """Return the 95th percentile of one or more values, always one of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]


def kind_of(source: str) -> TurnKind:
    """Return the kind of a turn from its ``LiveRequest.source``."""
    if source.startswith("cold"):
        return "restored"
    return "first" if source == FIRST else "hot" if source == "hot" else "missed"


class Tally:
    """The sums of one tenant, or of all."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._day = int(wall() // DAY_S)
        self._saved_tokens = self._turns = 0
        self._saved_s: float | None = None  # None until it is known of a turn
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
        """Count tokens of a running request."""
        self.paces[stretch.kind].add(stretch.begin, stretch.end, stretch.num_tokens)

    def first_tokens(self) -> dict[TurnKind, FirstTokenTimes]:
        """Return the times to first token of the latest streams, for each kind with any."""
        return {kind: first_token_times(seen) for kind, seen in self._first_tokens.items()}

    @property
    def wait_p95_s(self) -> float | None:
        """The 95th percentile of the latest turns' time in the gateway's line."""
        return round(p95(self._waits), 3) if self._waits else None

    def tokens_last_hour(self, now: float) -> int:
        """Return the tokens of the last hour: computed ones of prompts, and those of answers."""
        return round(sum(x.in_hour(now) for x in self.paces.values()))

    def hour(self, now: float, started: float) -> tuple[float, list[float], list[float]]:
        """Return the start of the last hour's first step, and the rates of both kinds by step."""
        until = int(now // STEP_S)
        first = min(until, max(int(started // STEP_S), until - HOUR_S // STEP_S))
        prompts, answers = (x.hour(first, until) for x in self.paces.values())
        return first * STEP_S, prompts, answers

    @property
    def today(self) -> tuple[int, float | None, int]:
        """The saved tokens, the saved seconds and the turns since midnight UTC."""
        self._turn_day()
        saved_s = None if self._saved_s is None else round(self._saved_s, 3)
        return self._saved_tokens, saved_s, self._turns

    def _turn_day(self) -> None:
        day = int(self._wall() // DAY_S)
        if day != self._day:
            self._day, self._saved_tokens, self._saved_s, self._turns = day, 0, None, 0


class Tallies:
    """The sums of each tenant and of all; those of tenants quiet for longest are dropped."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._everybody, self._none = Tally(wall), Tally(wall)
        self._of: dict[str, Tally] = {}

    def names(self) -> set[str]:
        """Return the tenants that have sums."""
        return set(self._of)

    def counting(self, tenant: str) -> tuple[Tally, Tally]:
        """Return the sums in which a tenant's turns count: those of all tenants, and its own."""
        own = self._of.pop(tenant, None) or Tally(self._wall)
        self._of[tenant] = own
        if len(self._of) > MAX_TENANTS:
            del self._of[next(iter(self._of))]
        return self._everybody, own

    def shown(self, tenant: str | None) -> Tally:
        """Return the sums of a tenant, empty if it has none; for None, those of all tenants."""
        return self._everybody if tenant is None else self._of.get(tenant, self._none)
