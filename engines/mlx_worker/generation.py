"""What the HTTP side asks of the owner thread, and what comes back.

The HTTP side turns a request into a ``Generation`` and reads ``Event``s from the ``Stream`` that
``Owner.submit`` returns. Nothing here imports mlx: samplers and logits processors are opaque
callables that the owner thread calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from kvstore.records import MissReason, SessionRef

# (1, vocab) log-probabilities -> (1,) token. Called on the owner thread only.
Sampler: TypeAlias = Callable[[Any], Any]
# (tokens so far, (1, vocab) logits) -> (1, vocab) logits. Called on the owner thread only.
LogitsProcessor: TypeAlias = Callable[[Any, Any], Any]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Row:
    """One of the ``n`` answers to a prompt. Never share a sampler between rows: it has state."""

    sampler: Sampler | None = None  # None = greedy
    logits_processors: Sequence[LogitsProcessor] = ()


@dataclass(frozen=True)
class Generation:
    prompt: list[int]  # at least one token
    rows: Sequence[Row]
    max_tokens: int
    # Token sequences that end a row; the tokens that end it are delivered too.
    stop_sequences: Sequence[tuple[int, ...]]
    session: SessionRef | None = None
    # Positions in ``prompt`` where a later turn may come back to (end of the system prompt, end of
    # the prompt before the generation marker). Models whose cache cannot be trimmed take a
    # snapshot of their state there.
    boundaries: Sequence[int] = ()
    top_logprobs: int | None = None  # None = no logprobs at all


@dataclass(frozen=True)
class CacheOutcome:
    """Where the reused part of the prompt came from."""

    source: Literal["hot", "cold-ram", "cold-disk", "cold-redis", "miss"]
    cached_tokens: int
    reason: MissReason | None = None

    def header(self) -> str:
        text = f"{self.source}; tokens={self.cached_tokens}"
        return f"{text}; reason={self.reason}" if self.reason else text


@dataclass(frozen=True)
class Admitted:
    """Always the first event: the prompt has its place in a batch."""

    cache: CacheOutcome


@dataclass(frozen=True)
class Prefill:
    done: int
    total: int


@dataclass(frozen=True)
class Token:
    row: int
    id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Finished:
    """One per row, its last event. ``cancelled`` after ``Stream.stop_row``."""

    row: int
    reason: FinishReason


@dataclass(frozen=True)
class Failed:
    """The generation died (a defect in a processor, out of memory); the last event of all rows."""

    message: str


Event: TypeAlias = Admitted | Prefill | Token | Finished | Failed


class Stream(Protocol):
    def events(self) -> AsyncIterator[Event]:
        """Ends after the last row finished, or after ``Failed``."""

    def stop_row(self, row: int) -> None:
        """End a row early (a stop string was seen). Its slot is free before the next step."""

    def cancel(self) -> None:
        """End all rows at once (the client went away); what was computed is still saved."""


class ContextTooLong(Exception):
    """The prompt leaves no room for an answer. Says both numbers."""


class Overloaded(Exception):
    """The waiting line is full."""


@dataclass(frozen=True)
class ModelFacts:
    """What the HTTP side needs to know of the loaded model."""

    name: str
    max_context: int
    vocab_size: int
    trimmable: bool
    hibernation: bool
    hibernation_reason: str = ""
    notes: Sequence[str] = field(default=())


class Generator(Protocol):
    """The owner thread as the HTTP side sees it; ``owner.Owner`` is one."""

    @property
    def facts(self) -> ModelFacts: ...

    def submit(self, generation: Generation) -> Stream:
        """Called on the event loop. Raises ``ContextTooLong`` or ``Overloaded``."""
