"""The scheduler side's record of one request, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engines.headers import COLD_SOURCES, CacheOutcome, CacheSource
from engines.vllm_plugin.messages import Staged
from engines.wire import RequestProgress
from kvstore.session import UNKNOWN_REASONS, MissReason, SessionRef, TierName
from kvstore.store.block_store import RestoredPart


@dataclass
class Restore:
    """A request's order to the ranks to stage its stored blobs."""

    ticket: int
    first_block: int
    asked_at: float  # monotonic
    staged: Staged | None = None
    loading: set[int] = field(default_factory=set)  # block ids


@dataclass
class TrackedRequest:
    """vLLM's request, and the outcome of its restore."""

    request: Any
    session: SessionRef | None
    restore: Restore | None = None
    probe: int | None = None  # the ticket of its probe
    barred: bool = False  # no more restores for this request
    failed: bool = False
    restored_tokens: int = 0
    only_part: bool = False  # no full block was restored: vLLM had all of the session's
    restored_part: RestoredPart | None = None  # the first rows of a block that it then filled up
    tier: TierName | None = None
    reason: MissReason | None = None
    reported: bool = False

    def outcome(self, num_computed_tokens: int) -> tuple[CacheSource, MissReason | None]:
        """The source of the prompt's KV, and the reason why no more of it was found."""
        source: CacheSource = "hot" if num_computed_tokens else "miss"
        if self.restored_tokens and self.tier and not (self.failed or self.only_part):
            source = COLD_SOURCES[self.tier]
        # Even for a hot prompt a search for its last few tokens fails; that reason is not reported.
        is_news = source != "hot" or self.reason not in UNKNOWN_REASONS
        return source, self.reason if is_news else None

    def progress(self, session: SessionRef) -> RequestProgress:
        """The tokens of the prompt that vLLM has, including reused ones, and of the answer."""
        prompt = int(self.request.num_prompt_tokens)
        return RequestProgress(
            session.tenant,
            session.id,
            prompt,
            min(prompt, int(self.request.num_computed_tokens)),
            int(self.request.num_output_tokens),
        )

    def cache_header(self, num_computed_tokens: int) -> str:
        """The value of the cache header, in the same form as from all our engines."""
        source, reason = self.outcome(num_computed_tokens)
        return CacheOutcome(source, num_computed_tokens, reason).header()
