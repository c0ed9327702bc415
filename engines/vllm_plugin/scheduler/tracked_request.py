"""The scheduler side's record of one request, and the division of its tokens into blocks.

vLLM caches only full blocks, and the cold store only full chunks of them. The tokens after the last
one are computed again in every turn, together with the new message.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

from engines.http import COLD_SOURCES, CacheOutcome, CacheSource
from engines.vllm_plugin.groups import DENSE, Groups
from engines.vllm_plugin.identity import has_own_salt
from engines.vllm_plugin.messages import Staged
from engines.wire import RequestProgress
from kvstore.session import UNKNOWN_REASONS, MissReason, SessionRef, TierName, chunk_of_blocks


@dataclass(frozen=True)
class TokenBlocks:
    """The block size, the groups of layers, and options for saves; fixed for an engine.

    ``keeps_ids``: the ids of the blocks' tokens are saved, too.
    """

    block_tokens: int
    groups: Groups = DENSE
    keeps_ids: bool = False

    @property
    def chunk_blocks(self) -> int:
        """The number of blocks in a chunk of the cold store."""
        return chunk_of_blocks(self.block_tokens) // self.block_tokens

    def in_chunks(self, num_blocks: int) -> int:
        """The number of the first ``num_blocks`` blocks that are in full chunks."""
        return num_blocks - num_blocks % self.chunk_blocks

    def num_restorable(self, request: Any) -> int:
        """The number of the prompt's blocks that may be restored: those of full chunks.

        At least one token must be computed, because the answer is sampled from its output.
        """
        return min(self.num_in_chunks(request), self.in_chunks(len(request.block_hashes)))

    def num_in_chunks(self, request: Any) -> int:
        """The number of blocks of full chunks in all tokens but the last, which is not computed."""
        return self.in_chunks((request.num_tokens - 1) // self.block_tokens)

    def computed_hashes(self, request: Any, num_blocks: int) -> list[bytes]:
        """The hashes of the fully computed blocks, from the first on; at most ``num_blocks``.

        Tokens of a step in flight do not count.
        """
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        num_full = min(min(computed, request.num_tokens) // self.block_tokens, num_blocks)
        return [bytes(x) for x in request.block_hashes[: max(num_full, 0)]]

    def computed_ids(self, request: Any, num_full: int) -> bytes:
        """The ids of the tokens of the first blocks, in the form of records; b"" if none are kept.

        None are kept either if the blocks' hashes depend on more than ids and the gateway's salt,
        such as images, because readers could not see that.
        """
        end = num_full * self.block_tokens
        has_more = request.prompt_embeds is not None or has_own_salt(request)
        if not self.keeps_ids or has_more:
            return b""
        if any(x.mm_position.offset < end for x in request.mm_features):
            return b""
        ids = request.all_token_ids[:end]
        return struct.pack(f"<{len(ids)}I", *ids)


@dataclass
class Restore:
    """A request's order to the ranks to stage its stored blobs."""

    ticket: int
    first_block: int
    asked_at: float  # monotonic
    staged: Staged | None = None


class Restoring(enum.Enum):
    """Names the phases of a request's restores: it begins as ``OPEN``; the others are final."""

    OPEN = "more of its prompt may be restored"
    OVER = "no more of it may be restored"
    FAILED = "the restored blocks were wrong"


@dataclass
class TrackedRequest:
    """vLLM's request, and the outcome of its restore."""

    request: Any
    session: SessionRef | None
    restore: Restore | None = None
    waits_since: float | None = None  # for room, monotonic
    restoring: Restoring = Restoring.OPEN
    restored_tokens: int = 0
    tier: TierName | None = None
    reason: MissReason | None = None
    why_none: MissReason = "never-stored"  # see ``ResidentSessions``
    reported: bool = False
    # The request that it last waited for (``PrefillsInFlight``): its id and its computed tokens.
    awaited: tuple[str, int] | None = None
    num_stalled: int = 0  # checks since then in which that request had computed no more

    def note_staged(self, reason: MissReason | None) -> None:
        """Note the ranks' reason. They are not informed of a session that is too short to save."""
        is_short = reason == "never-stored" and self.why_none == "too-short"
        self.reason = self.why_none if is_short else reason

    @property
    def num_restored(self) -> int:
        """The number of tokens that came from the store; 0 if the restore failed."""
        return 0 if self.restoring is Restoring.FAILED else self.restored_tokens

    def outcome(self, num_computed_tokens: int) -> CacheOutcome:
        """The source of the prompt's KV, and the reason why no more of it was found.

        In the same form as from all our engines.
        """
        source: CacheSource = "hot" if num_computed_tokens else "miss"
        if self.num_restored and self.tier:
            source = COLD_SOURCES[self.tier]
        # Even for a hot prompt a search for its last few tokens fails; that reason is not reported.
        is_news = source != "hot" or self.reason not in UNKNOWN_REASONS
        return CacheOutcome(source, num_computed_tokens, self.reason if is_news else None)

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
