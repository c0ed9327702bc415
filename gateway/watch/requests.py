"""The one account of a request, from its arrival to the end of its answer; numbers and times only.

Prometheus, the page, the session's past and traces are all fed from it (``gateway.watch.live``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from engines.http import CACHE_HEADER, PROMPT_HEADER, CacheOutcome
from engines.wire import RequestProgress, SessionRef
from gateway.identity.outline import Compared
from gateway.watch.shape import Phase, TurnRecord

log = logging.getLogger("thermocline.gateway")

FIRST: Final = "first"  # in place of a source
TokenKind: TypeAlias = Literal["computed", "answered"]  # of the prompt, and of the answer


class PromptDetails(msgspec.Struct, frozen=True):
    """The part of ``Usage`` that says how much of the prompt was not computed."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None  # newly stored; few engines report it
    created_cache_tokens: int | None = None  # vLLM's name for the same


class AnswerDetails(msgspec.Struct, frozen=True):
    """The part of ``Usage`` that says how much of the answer was reasoning."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The counted part of OpenAI's ``usage``."""

    prompt_tokens: int = 0
    answered: int | None = msgspec.field(default=0, name="completion_tokens")
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: AnswerDetails | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer."""
        return self.answered or 0

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were not computed."""
        return (self.prompt_tokens_details or _NO_DETAILS).cached_tokens or 0

    @property
    def cache_written(self) -> int:
        """Tokens of the prompt that were newly stored."""
        return (self.prompt_tokens_details or _NO_DETAILS).cache_write_tokens or 0

    @property
    def reasoning(self) -> int:
        """Tokens of the answer that were reasoning."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details else None) or 0


_NO_DETAILS = PromptDetails()


class Stretch(NamedTuple):
    """Tokens that came between two moments, in seconds of the request's clock."""

    kind: TokenKind
    begin: float
    end: float
    num_tokens: int


class StreamProgress(Protocol):
    """A streamed answer, as far as it has come."""

    @property
    def num_events(self) -> int:
        """Its events that hold some of the answer, each about a token."""

    @property
    def prefill(self) -> tuple[int, int] | None:
        """The tokens of the prompt that are there, and all; None if the engine did not say."""


class LiveRequest:
    """One request while it is served. Belongs to the event loop."""

    def __init__(
        self,
        ref: SessionRef,
        request_id: str,
        operation: str,
        client: str,
        at: float,
        clock: Callable[[], float],
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
        self.named_cache = False  # the engine's answer says what was reused
        self.cache: CacheOutcome | None = None  # None: that had no known form
        # What it used: of its prompt from the head of the engine's answer on, of all when the
        # engine has counted.
        self.usage: Usage | None = None
        self.is_counted = False
        self.used: Usage | None = None  # as it is charged; None: the engine did not serve it
        self.stream: StreamProgress | None = None
        self.first_token_s: float | None = None
        self.token_s: float | None = None  # for each after the first; None where it was not seen
        self.waited_s = 0.0
        self.diverged = ""  # the part of the prompt that left the one before; "" if none did
        self.error = ""
        self.progress: RequestProgress | None = None  # the engine's latest report
        self._clock = clock
        self._began = clock()
        self._opened = self._began
        self._prefilled_s: float | None = None  # from there to the last word of the prefill
        # The tokens that ``uncounted`` has given, and the moment until which.
        self._given: dict[TokenKind, tuple[int, float]] = {}

    # ---- what happens to it

    def admitted(self) -> None:
        """Its slot was free: the engine has it from now on."""
        self.phase = "prefill"
        self._opened = self._clock()
        self.waited_s = self._opened - self._began

    def engine_answered(self, headers: Mapping[str, str]) -> None:
        """Read in the head of the engine's answer how much of the prompt is reused."""
        self.named_cache = CACHE_HEADER in headers
        self.cache = CacheOutcome.parse(headers.get(CACHE_HEADER, ""))
        prompt_tokens = headers.get(PROMPT_HEADER, "")
        if self.cache is not None and prompt_tokens.isdecimal():
            cached = PromptDetails(cached_tokens=self.cache.cached_tokens)
            self.usage = Usage(int(prompt_tokens), 0, cached)
        if self.compared is not None:
            self.compared.cached_tokens = self.reused_tokens

    def look(self) -> None:
        """See how far the stream is; called whenever more of it has come."""
        if self.first_token_s is not None or self.stream is None:
            return
        if self.stream.num_events:
            self.phase = "decode"
            self.first_token_s = self.age_s
        elif self.stream.prefill is not None:
            done, whole = self.stream.prefill
            self.progress = RequestProgress(self.ref.tenant, self.ref.id, whole, done, 0)
            self._prefilled_s = self._clock() - self._opened

    def answered(self, usage: Usage | None) -> None:
        """Take the engine's counts, if it sent any, at the end of its answer."""
        if usage is not None:
            details = usage.prompt_tokens_details or PromptDetails(self.reused_tokens)
            self.usage = msgspec.structs.replace(usage, prompt_tokens_details=details)
            self.is_counted = True
        if self.compared is not None:
            self._note_prompt(self.compared, usage)
        rest = self.answered_tokens - 1
        if self.first_token_s is not None and rest > 0:
            self.token_s = (self.age_s - self.first_token_s) / rest

    def _note_prompt(self, compared: Compared, usage: Usage | None) -> None:
        """Keep the counts beside the prompt; log that it left the one before it."""
        if usage is not None:
            compared.prompt_tokens = usage.prompt_tokens
            compared.answer_tokens = usage.completion_tokens
        if (change := compared.change) is None:
            return
        self.diverged = change.part
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

    def charge(self) -> Usage:
        """Settle what a turn that the engine served has used, and return it.

        Of an answer that ended before the engine reported its counts they are estimated; of a
        prefill that was broken off only what was computed counts.
        """
        if self.usage is not None and self.is_counted:
            self.used = self.usage
        else:
            prompt = self.prompt_tokens or 0
            if self.phase_now != "decode":
                prompt = self.prefilled_tokens or min(prompt, self.reused_tokens)
            cached = PromptDetails(cached_tokens=min(prompt, self.reused_tokens))
            self.used = Usage(prompt, self.answered_tokens, cached)
        return self.used

    def uncounted(self) -> list[Stretch]:
        """Give the tokens that came since this was called last, and between which moments."""
        if not self.in_engine:
            return []
        now = until = self._clock()
        since = self._opened
        if self.first_token_s is not None:
            since = until = self._began + self.first_token_s
        if self.phase_now == "decode" or self.is_counted:
            num_computed = self.computed_tokens or 0
        else:
            num_computed = max(0, (self.prefilled_tokens or 0) - self.reused_tokens)
        return [
            *self._rise("computed", num_computed, self._opened, until),
            *self._rise("answered", self.answered_tokens, since, now),
        ]

    def _rise(self, kind: TokenKind, num_tokens: int, begin: float, end: float) -> list[Stretch]:
        before, until = self._given.get(kind, (0, begin))
        if num_tokens <= before:
            return []
        begin = max(begin, until)
        end = max(begin, end)
        self._given[kind] = num_tokens, end
        return [Stretch(kind, begin, end, num_tokens - before)]

    # ---- how far it is

    @property
    def age_s(self) -> float:
        """Seconds since it came."""
        return self._clock() - self._began

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
    def phase_now(self) -> Phase:
        """The phase; the engine knows better where an answer is not streamed."""
        answers = self.progress is not None and self.progress.answered_tokens > 0
        return "decode" if answers and self.phase == "prefill" else self.phase

    @property
    def tokens_so_far(self) -> int:
        """The length of its session, answer included; 0 until the engine reports it."""
        return (self.prompt_tokens or 0) + self.answered_tokens if self.in_engine else 0

    @property
    def prefill_seen(self) -> tuple[int, float]:
        """The tokens that were computed of the prompt, and the seconds that this took."""
        if self.prefill_s is not None:
            return self.computed_tokens or 0, self.prefill_s
        if self.progress is None or self._prefilled_s is None:
            return 0, 0.0
        return self.progress.prefilled_tokens - self.reused_tokens, self._prefilled_s

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the engine's taking it to the first token; None if that was not seen."""
        return None if self.first_token_s is None else self.first_token_s - self.waited_s

    @property
    def reused_tokens(self) -> int:
        """The part of the prompt that was not computed."""
        if self.usage is not None:
            return self.usage.cached
        return self.cache.cached_tokens if self.cache else 0

    @property
    def computed_tokens(self) -> int | None:
        """The part of the prompt that was not reused; None while its length is not known."""
        prompt_tokens = self.prompt_tokens
        return None if prompt_tokens is None else max(0, prompt_tokens - self.reused_tokens)

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

    def turn(self, saved_s: float | None) -> TurnRecord:
        """Sum it up when it is over."""
        cache, reused_tokens = self.cache, self.reused_tokens
        change = self.compared.change if self.compared else None
        restored = cache is not None and cache.source.startswith("cold")
        return TurnRecord(
            at=round(self.at, 3),
            client=self.client,
            operation=self.operation,
            source=self.source,
            reason=cache.reason if cache else None,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=reused_tokens,
            restored_tokens=reused_tokens if restored else 0,
            computed_tokens=self.computed_tokens,
            answered_tokens=self.answered_tokens or (0 if self.is_counted else None),
            waited_s=round(self.waited_s, 3),
            first_token_s=None if self.first_token_s is None else round(self.first_token_s, 3),
            total_s=round(self.age_s, 3),
            saved_s=None if saved_s is None else round(saved_s, 3),
            changed=change.part if change else None,
            at_message=change.at_message if change and change.part == "messages" else None,
            error=self.error,
        )
