"""Follows every request from its arrival to the end of its answer; numbers and times only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

import msgspec

from engines.http import CACHE_HEADER, PROMPT_HEADER, CacheOutcome
from engines.wire import RequestProgress, SessionRef
from gateway.identity.outline import Compared, PromptChange
from gateway.watch.metrics import Metrics, PromptDetails, Usage
from gateway.watch.shape import Phase, TurnRecord

log = logging.getLogger("thermocline.gateway")

FIRST: Final = "first"  # in place of a source


class Stretch(NamedTuple):
    """Tokens that came between two moments, in seconds of the request's clock."""

    begin: float
    end: float
    computed: int = 0
    answered: int = 0


class _TokenCount:
    """The tokens of one kind that were counted, and the moment until which."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._until = float("-inf")

    def rise(self, num_tokens: int, begin: float, end: float) -> list[tuple[float, float, int]]:
        """Count all up to ``num_tokens``; gives those that are new, and between which moments."""
        new, begin = num_tokens - self._num_tokens, max(begin, self._until)
        if new <= 0:
            return []
        self._num_tokens, self._until = num_tokens, max(begin, end)
        return [(begin, self._until, new)]


class StreamProgress(Protocol):
    """A streamed answer, as far as it has come."""

    @property
    def num_events(self) -> int:
        """Its events that hold some of the answer, each about a token."""

    @property
    def prefill(self) -> tuple[int, int] | None:
        """The tokens of the prompt that are there, and all; None if the engine did not say."""


class LiveRequest:
    """Follows one request while it is served, and counts it in the metrics.

    Belongs to the event loop.
    """

    def __init__(
        self,
        ref: SessionRef,
        request_id: str,
        operation: str,
        client: str,
        at: float,
        clock: Callable[[], float],
        metrics: Metrics,
        model: str = "",
    ) -> None:
        """
        Args:
            operation: OpenTelemetry's name.
            client: a word for the program that asks.
            at: the Unix time of its arrival.
            model: the served one's name.
        """
        self.ref = ref
        self.is_first = False  # True: its session was unknown here when it came
        self.id = request_id
        self.operation = operation
        self.client = client
        self.at = at
        self.model = model
        self.title = ""  # for its session; shown to readers of that session only
        self.compared: Compared | None = None  # with the request before it in its session
        self.phase: Phase = "waiting"
        self.cache: CacheOutcome | None = None
        # The one account of what it used: of its prompt from the head of the engine's answer on,
        # of all when the engine has counted.
        self.usage: Usage | None = None
        self.is_counted = False
        self.stream: StreamProgress | None = None
        self.first_token_s: float | None = None
        self.waited_s = 0.0
        self.error = ""
        self.progress: RequestProgress | None = None  # the engine's latest report
        self._metrics = metrics
        self._clock = clock
        self._began = clock()
        self._opened = self._began
        self._prefilled_s: float | None = None  # from there to the last word of the prefill
        self._computed, self._answered = _TokenCount(), _TokenCount()

    def admitted(self) -> None:
        """Its slot was free: the engine has it from now on."""
        self.phase = "prefill"
        self._opened = self._clock()
        self.waited_s = self._opened - self._began

    def engine_answered(self, headers: Mapping[str, str]) -> None:
        """Read in the head of the engine's answer how much of the prompt is reused."""
        self.cache = CacheOutcome.parse(headers.get(CACHE_HEADER, ""))
        if CACHE_HEADER in headers:
            self._metrics.cache_outcome(self.cache)
        prompt_tokens = headers.get(PROMPT_HEADER, "")
        if self.cache is not None and prompt_tokens.isdecimal():
            cached = PromptDetails(cached_tokens=self.cache.cached_tokens)
            self.usage = Usage(int(prompt_tokens), 0, cached)
        if self.compared is not None:
            self.compared.cached_tokens = self.reused_tokens

    def answered(self, usage: Usage | None) -> None:
        """Take the engine's counts, if it sent any, at the end of its answer."""
        if usage is not None:
            details = usage.prompt_tokens_details or PromptDetails(self.reused_tokens)
            self.usage = msgspec.structs.replace(usage, prompt_tokens_details=details)
            self.is_counted = True
            if self.compared is not None:
                self.compared.prompt_tokens = usage.prompt_tokens
                self.compared.answer_tokens = usage.completion_tokens
        if self.compared is not None and self.compared.change is not None:
            self._diverged(self.compared, self.compared.change)
        if (pace := self.token_s) is not None:
            self._metrics.per_token(self.operation, self.model, pace)

    def _diverged(self, compared: Compared, change: PromptChange) -> None:
        """Count and log that the prompt left the one before it; numbers only, no content."""
        self._metrics.diverged(change.part)
        log.info(
            "session %s: the %s changed (message %d of %d): %d of %d tokens were reused",
            self.ref.id,
            change.part,
            change.at_message,
            compared.outline.num_messages,
            compared.cached_tokens,
            compared.prompt_tokens,
            extra={"request_id": self.id, "session": self.ref.id},
        )

    def count(self) -> Usage:
        """Count and return the tokens of a turn that the engine served."""
        used = self.usage if self.usage is not None and self.is_counted else self._used_so_far()
        self._metrics.used(self.operation, self.model, used)
        return used

    def ended(self) -> None:
        """Count the request once it is over, by its ``error``."""
        seconds = self._clock() - self._began
        self._metrics.turn_ended(self.operation, self.model, seconds, self.error)

    @property
    def source(self) -> str | None:
        """The place that its prompt's KV came from; ``FIRST`` of a first turn, None if unknown yet.

        A first turn is no return, though it may share a beginning with other sessions. One that is
        unknown here and lies on Redis may be another server's.
        """
        if self.cache is None:
            return None
        source, reason = self.cache.source, self.cache.reason
        if source == "miss":
            is_first = reason == "never-stored" or (self.is_first and reason in (None, "disabled"))
        else:
            is_first = self.is_first and source != "cold-redis"
        return FIRST if is_first else source

    @property
    def in_engine(self) -> bool:
        """True once the engine has it."""
        return self.phase != "waiting"

    @property
    def tokens_so_far(self) -> int:
        """The length of its session, answer included; 0 until the engine reports it."""
        return (self.prompt_tokens or 0) + self.answered_tokens if self.in_engine else 0

    def uncounted(self) -> list[Stretch]:
        """Count the tokens that came since this was called last, and between which moments."""
        if not self.in_engine:
            return []
        now, begin = self._clock(), self._opened
        if self.phase_now == "decode" or self.is_counted:
            num_computed = self.computed_tokens or 0
        else:
            num_computed = max(0, (self.prefilled_tokens or 0) - self.reused_tokens)
        first = None if self.first_token_s is None else self._began + self.first_token_s
        computed = self._computed.rise(num_computed, begin, now if first is None else first)
        answered = self._answered.rise(self.answered_tokens, begin if first is None else first, now)
        return [
            *(Stretch(begin, end, computed=n) for begin, end, n in computed),
            *(Stretch(begin, end, answered=n) for begin, end, n in answered),
        ]

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the engine's taking it to the first token; None if that was not seen."""
        return None if self.first_token_s is None else self.first_token_s - self.waited_s

    @property
    def prefill_seen(self) -> tuple[int, float]:
        """The tokens that were computed of the prompt, and the seconds that this took."""
        if self.prefill_s is not None:
            return self.computed_tokens or 0, self.prefill_s
        if self.progress is None or self._prefilled_s is None:
            return 0, 0.0
        return self.progress.prefilled_tokens - self.reused_tokens, self._prefilled_s

    @property
    def token_s(self) -> float | None:
        """Seconds for each token after the first, so far; None where that was not seen."""
        rest = self.answered_tokens - 1
        if self.first_token_s is None or rest < 1:
            return None
        return (self._clock() - self._began - self.first_token_s) / rest

    @property
    def reused_tokens(self) -> int:
        """The part of the prompt that was not computed."""
        if self.usage is not None:
            return self.usage.cached
        return self.cache.cached_tokens if self.cache else 0

    @property
    def computed_tokens(self) -> int | None:
        """The part of the prompt that was not reused; None while its length is not known."""
        if self.prompt_tokens is None:
            return None
        return max(0, self.prompt_tokens - self.reused_tokens)

    @property
    def answered_tokens(self) -> int:
        """The tokens of the answer so far, by its events or as the engine last reported."""
        if self.usage is not None and self.is_counted:
            return self.usage.completion_tokens
        return max(
            self.stream.num_events if self.stream else 0,
            self.progress.answered_tokens if self.progress else 0,
        )

    @property
    def phase_now(self) -> Phase:
        """The phase; the engine knows better where an answer is not streamed."""
        answers = self.progress is not None and self.progress.answered_tokens > 0
        return "decode" if answers and self.phase == "prefill" else self.phase

    @property
    def prompt_tokens(self) -> int | None:
        if self.usage is not None:
            return self.usage.prompt_tokens
        return self.progress.prompt_tokens if self.progress else None

    @property
    def prefilled_tokens(self) -> int | None:
        """The finished part of the prompt, reused or computed; None until it is reported."""
        if self.phase == "decode":
            return self.prompt_tokens
        return self.progress.prefilled_tokens if self.progress else None

    def _used_so_far(self) -> Usage:
        """Estimate the counts of an answer that ended before the engine reported them.

        Of a prefill that was broken off only what was computed counts.
        """
        prompt = self.prompt_tokens or 0
        if self.phase_now != "decode":
            prompt = self.prefilled_tokens or min(prompt, self.reused_tokens)
        cached = PromptDetails(cached_tokens=min(prompt, self.reused_tokens))
        return Usage(prompt, self.answered_tokens, cached)

    def attributes(self) -> dict[str, str | int | float]:
        """Describe it by OpenTelemetry's names, as far as it is known."""
        known: dict[str, str | int | float | None] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "thermocline",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.conversation.id": self.ref.id,
            "gen_ai.response.time_to_first_chunk": self.first_token_s,
            "thermocline.client": self.client,
            "thermocline.waited_s": round(self.waited_s, 6),
        }
        if self.cache is not None:
            known["thermocline.cache.source"] = self.cache.source
            known["thermocline.cache.reason"] = self.cache.reason
        if (usage := self.usage) is not None and self.is_counted:
            known |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached,
                "gen_ai.usage.cache_creation.input_tokens": usage.cache_written,
                "gen_ai.usage.reasoning.output_tokens": usage.reasoning,
            }
        return {name: value for name, value in known.items() if value is not None}

    def look(self) -> None:
        """See how far the stream is; called whenever more of it has come."""
        if self.first_token_s is None and self.stream is not None:
            self._look_for_first_token(self.stream)

    def _look_for_first_token(self, stream: StreamProgress) -> None:
        if stream.num_events:
            self.phase = "decode"
            self.first_token_s = self._clock() - self._began
            self._metrics.first_token(self.operation, self.model, self.first_token_s, self.source)
        elif stream.prefill is not None:
            done, whole = stream.prefill
            self.progress = RequestProgress(self.ref.tenant, self.ref.id, whole, done, 0)
            self._prefilled_s = self._clock() - self._opened

    def turn(self, saved_s: float | None) -> TurnRecord:
        """Sum it up when it is over."""
        cache = self.cache
        change = self.compared.change if self.compared else None
        restored = cache is not None and cache.source.startswith("cold")
        return TurnRecord(
            at=round(self.at, 3),
            client=self.client,
            operation=self.operation,
            source=self.source,
            reason=cache.reason if cache else None,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused_tokens,
            restored_tokens=self.reused_tokens if restored else 0,
            computed_tokens=self.computed_tokens,
            answered_tokens=self.answered_tokens or (0 if self.is_counted else None),
            waited_s=round(self.waited_s, 3),
            first_token_s=None if self.first_token_s is None else round(self.first_token_s, 3),
            total_s=round(self._clock() - self._began, 3),
            saved_s=None if saved_s is None else round(saved_s, 3),
            changed=change.part if change else None,
            at_message=change.at_message if change and change.part == "messages" else None,
            error=self.error,
        )


def of_tenant(requests: Iterable[LiveRequest], tenant: str | None) -> list[LiveRequest]:
    """Choose a tenant's requests; all of them for None."""
    return [x for x in requests if tenant is None or x.ref.tenant == tenant]
