"""One request between its coming and its end, as the half beside vLLM's scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engines.vllm_plugin.messages import Staged
from kvstore.records import MissReason, SessionRef, TierName


@dataclass
class Restore:
    """What a request asked its ranks to stage."""

    ticket: int
    first_block: int
    asked_at: float
    staged: Staged | None = None
    loading: set[int] = field(default_factory=set)  # block ids


@dataclass
class Unacked:
    """Blocks that are held until ``num_ranks`` more ranks have copied them out."""

    session: SessionRef
    block_ids: list[int]
    num_ranks: int
    is_skipped: bool = False  # by one of the ranks


@dataclass
class Turn:
    request: Any
    session: SessionRef | None
    restore: Restore | None = None
    peek: int | None = None  # ticket of the question whether there is anything to wait for
    barred: bool = False  # no more restores for this request
    failed: bool = False
    restored_tokens: int = 0
    only_part: bool = False  # no full block of them: vLLM had all of the session's
    tier: TierName | None = None
    reason: MissReason | None = None
    reported: bool = False

    def outcome(self, num_computed_tokens: int) -> tuple[str, MissReason | None]:
        """Where the prompt's KV came from, and why not more of it."""
        source = "hot" if num_computed_tokens else "miss"
        if self.restored_tokens and self.tier and not (self.failed or self.only_part):
            source = f"cold-{self.tier}"
        # Of a hot prompt the last few tokens are always asked for in vain.
        is_news = (source, self.reason) != ("hot", "never-stored")
        return source, self.reason if is_news else None

    def cache_header(self, num_computed_tokens: int) -> str:
        """The value of the cache header, as every engine of ours gives it."""
        source, reason = self.outcome(num_computed_tokens)
        text = f"{source}; tokens={num_computed_tokens}"
        return f"{text}; reason={reason}" if reason else text


def num_final(request: Any) -> int:
    """Tokens whose KV is there; a step in flight does not count."""
    computed: int = request.num_computed_tokens - request.num_in_flight_tokens
    known: int = request.num_tokens
    return min(computed, known)
