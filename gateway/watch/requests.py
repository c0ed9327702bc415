"""The record of one request, from its arrival to the end of its answer: numbers and times only.

Metrics, the dashboard, the session's history and traces all get their figures from it, through
``gateway.watch.live``.
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

FIRST: Final = "first"  # the source of a session's first turn
TokenKind: TypeAlias = Literal["computed", "answered"]  # computed of the prompt; of the answer


class PromptDetails(msgspec.Struct, frozen=True):
    """The details of a prompt in ``Usage``."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None  # newly stored; few engines report it
    created_cache_tokens: int | None = None  # vLLM's name for the same


class AnswerDetails(msgspec.Struct, frozen=True):
    """The details of an answer in ``Usage``."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's ``usage``, with the fields that are used here."""

    prompt_tokens: int = 0
    answered: int | None = msgspec.field(default=0, name="completion_tokens")
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: AnswerDetails | None = None

    @property
    def completion_tokens(self) -> int:
        """The number of the answer's tokens."""
        return self.answered or 0

    @property
    def cached(self) -> int:
        """The number of the prompt's tokens that were reused."""
        return (self.prompt_tokens_details or _NO_DETAILS).cached_tokens or 0

    @property
    def cache_written(self) -> int:
        """The number of the prompt's tokens that were newly stored."""
        return (self.prompt_tokens_details or _NO_DETAILS).cache_write_tokens or 0

    @property
    def reasoning(self) -> int:
        """The number of the answer's tokens that were reasoning."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens if details else None) or 0


_NO_DETAILS = PromptDetails()


class Stretch(NamedTuple):
    """Tokens that were computed between two times, in seconds of the request's clock."""

    kind: TokenKind
    begin: float
    end: float
    num_tokens: int


class StreamProgress(Protocol):
    """The progress of a streamed answer."""

    @property
    def num_events(self) -> int:
        """The number of events with a part of the answer, each about a token."""

    @property
    def prefill(self) -> tuple[int, int] | None:
        """The prompt's tokens so far, and in all; None if the engine did not report them."""


class LiveRequest:
    """One request while it is served. Runs on the event loop."""

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
            operation: OpenTelemetry's name of the kind of request.
            client: the client program's name; see ``names.client_name``.
            at: the Unix time of its arrival.
            clock: returns seconds; used for all durations.
            model: the served model's name.
        """
        self.ref = ref
        self.is_first = False  # True: its session was unknown here when it came
        self.id = request_id
        self.operation = operation
        self.client = client
        self.at = at
        self.model = model
        self.title = ""  # for its session; shown to readers of that session only
        self.compared: Compared | None = None  # with the previous request of its session
        self.phase: Phase = "waiting"
        self.named_cache = False  # True: the engine's answer has ``CACHE_HEADER``
        self.cache: CacheOutcome | None = None  # None: no such header, or it was malformed
        # The prompt's tokens, from the head of the engine's answer on; all tokens, once
        # ``is_counted``: the engine has sent its counts.
        self.usage: Usage | None = None
        self.is_counted = False
        self.used: Usage | None = None  # what is charged; None: the engine did not serve it
        self.stream: StreamProgress | None = None
        self.first_token_s: float | None = None
        self.token_s: float | None = None  # for each token after the first; None: not known
        self.waited_s = 0.0
        self.diverged = ""  # the first part of the prompt that changed; "" if none did
        self.error = ""
        self.progress: RequestProgress | None = None  # the engine's latest report
        self._clock = clock
        self._began = clock()
        self._opened = self._began
        self._prefilled_s: float | None = None  # from ``_opened`` to the last progress of prefill
        # The tokens that ``uncounted`` has returned, and the time up to which.
        self._given: dict[TokenKind, tuple[int, float]] = {}

    # ---- events of the request

    def admitted(self) -> None:
        """Note that the request has its slot, and is sent to the engine."""
        self.phase = "prefill"
        self._opened = self._clock()
        self.waited_s = self._opened - self._began

    def engine_answered(self, headers: Mapping[str, str]) -> None:
        """Read from the head of the engine's answer how much of the prompt is reused."""
        self.named_cache = CACHE_HEADER in headers
        self.cache = CacheOutcome.parse(headers.get(CACHE_HEADER, ""))
        prompt_tokens = headers.get(PROMPT_HEADER, "")
        if self.cache is not None and prompt_tokens.isdecimal():
            cached = PromptDetails(cached_tokens=self.cache.cached_tokens)
            self.usage = Usage(int(prompt_tokens), 0, cached)
        if self.compared is not None:
            self.compared.cached_tokens = self.reused_tokens

    def look(self) -> None:
        """Note the progress of the stream; called after each chunk."""
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
        """Note the engine's token counts, if it sent any, at the end of its answer."""
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
        """Note the token counts for the next comparison; log how the prompt changed, if it did."""
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
        """Return the tokens to charge for a turn that the engine served, and note them.

        If the answer ended before the engine sent its counts, they are estimated; of an aborted
        prefill only the finished part counts.
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
        """Return the tokens since the last call, with the times between which they came."""
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

    # ---- progress

    @property
    def age_s(self) -> float:
        """Seconds since its arrival."""
        return self._clock() - self._began

    @property
    def source(self) -> str | None:
        """The place that its prompt's KV came from; None until it is known.

        ``FIRST`` for a session's first turn, even if its prompt shares a beginning with other
        sessions. A session that is unknown here but was found on Redis may be another server's.
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
        """True once it was sent to the engine."""
        return self.phase != "waiting"

    @property
    def phase_now(self) -> Phase:
        """The phase, also for an answer that is not streamed: then by the engine's reports."""
        answers = self.progress is not None and self.progress.answered_tokens > 0
        return "decode" if answers and self.phase == "prefill" else self.phase

    @property
    def tokens_so_far(self) -> int:
        """The number of tokens of prompt and answer so far; 0 until the engine reports it."""
        return (self.prompt_tokens or 0) + self.answered_tokens if self.in_engine else 0

    @property
    def prefill_seen(self) -> tuple[int, float]:
        """The number of the prompt's tokens that were computed so far, and the seconds it took."""
        if self.prefill_s is not None:
            return self.computed_tokens or 0, self.prefill_s
        if self.progress is None or self._prefilled_s is None:
            return 0, 0.0
        return self.progress.prefilled_tokens - self.reused_tokens, self._prefilled_s

    @property
    def prefill_s(self) -> float | None:
        """Seconds from the start in the engine to the first token; None if not streamed so far."""
        return None if self.first_token_s is None else self.first_token_s - self.waited_s

    @property
    def reused_tokens(self) -> int:
        """The number of the prompt's tokens that were reused."""
        if self.usage is not None:
            return self.usage.cached
        return self.cache.cached_tokens if self.cache else 0

    @property
    def computed_tokens(self) -> int | None:
        """The number of the prompt's tokens that were not reused; None until it is known."""
        prompt_tokens = self.prompt_tokens
        return None if prompt_tokens is None else max(0, prompt_tokens - self.reused_tokens)

    @property
    def answered_tokens(self) -> int:
        """The number of the answer's tokens so far, by its events or the engine's last report."""
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
        """The number of the prompt's tokens that were reused or computed; None until reported."""
        if self.phase == "decode":
            return self.prompt_tokens
        return self.progress.prefilled_tokens if self.progress else None

    def turn(self, saved_s: float | None) -> TurnRecord:
        """Return the summary of the request, for its session's history.

        ``saved_s``: the seconds of prefill that it saved; None if not known.
        """
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
