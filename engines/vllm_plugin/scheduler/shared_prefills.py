"""Makes a request wait while another one prefills the same beginning of its prompt.

vLLM offers a block to other requests as soon as the step that computes it is planned. But a running
request does not look for such blocks again: requests with the same beginning that are admitted
together would all compute it. So a request is held back while a running one will compute its next
chunk; then it starts from that request's blocks, through vLLM's own prefix cache.

A running request comes before new ones in every step, and gets as many tokens as any of them would.
So waiting for it takes no more steps than computing beside it, except one step for each piece that
several would compute in the same step. A request does not wait for one that is far from the tokens
it needs (a request for its prompt's logprobs starts at its first token), and stops waiting for one
that gets no tokens, or is aborted or preempted. Requests wait only for running ones, which wait for
none, so there is no deadlock.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final, NamedTuple

from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks, TrackedRequest

# Steps in a row in which the running request may get no tokens.
MAX_STALLED: Final = 4


class Awaited(NamedTuple):
    """The running request that another waits for, and the length of their common prefix."""

    request: Any
    num_tokens: int


class PrefillsInFlight:
    """The requests whose prompts vLLM computes now. All methods run on vLLM's thread."""

    def __init__(self, blocks: TokenBlocks, step_tokens: int) -> None:
        """``step_tokens``: the most tokens that vLLM computes in a step."""
        self._blocks = blocks
        self._step_tokens = step_tokens
        self._prefilled: dict[str, Any] = {}  # vLLM's requests by id
        self._held_back: dict[str, Awaited] = {}  # by the id of the request that waits

    def begin(self, request: Any) -> None:
        """Note that vLLM has set blocks aside for this request."""
        self._prefilled[request.request_id] = request
        self._held_back.pop(request.request_id, None)

    def end(self, request_id: str) -> None:
        """Forget a request that has ended; any request may be named."""
        self._prefilled.pop(request_id, None)
        self._held_back.pop(request_id, None)

    @property
    def num_held_back(self) -> int:
        """The number of requests whose beginning a running request has yet to compute."""
        return sum(
            x.request.request_id in self._prefilled
            and x.request.status.name == "RUNNING"
            and x.request.num_computed_tokens < x.num_tokens
            for x in self._held_back.values()
        )

    def forget_computed(self) -> None:
        """Forget the requests whose prompts are computed."""
        for request_id, request in list(self._prefilled.items()):
            if request.num_computed_tokens >= request.num_tokens - 1:
                del self._prefilled[request_id]

    def is_held_back(self, tracked: TrackedRequest, num_computed_tokens: int) -> bool:
        """Return whether a request that was held back must continue to wait."""
        if tracked.request.request_id not in self._held_back:
            return False
        return self.holds_back(tracked, num_computed_tokens)

    def holds_back(self, tracked: TrackedRequest, num_computed_tokens: int) -> bool:
        """Hold a request back if a running one will compute the chunk after these tokens.

        vLLM asks once a step; this compares one hash with every prompt that is being computed. The
        hash of a block covers all tokens before it, the tenant's salt and the adapter.
        """
        other = self._computing_next(tracked, num_computed_tokens)
        if other is not None and not self._is_stalled(tracked, other):
            awaited = self._awaited(tracked.request, other)
            if self._is_near(awaited, num_computed_tokens):
                self._held_back[tracked.request.request_id] = awaited
                return True
        self._held_back.pop(tracked.request.request_id, None)
        return False

    def _computing_next(self, tracked: TrackedRequest, num_computed_tokens: int) -> Any | None:
        if not self._prefilled or tracked.request.skip_reading_prefix_cache:
            return None
        end = num_computed_tokens // self._blocks.block_tokens + self._blocks.chunk_blocks
        if end > self._blocks.num_restorable(tracked.request):
            return None
        wanted = tracked.request.block_hashes[end - 1]
        found = [x for x in self._prefilled.values() if self._computes(x, end, wanted)]
        return max(found, key=lambda x: int(x.num_computed_tokens), default=None)

    def _is_near(self, awaited: Awaited, num_computed_tokens: int) -> bool:
        """Return whether waiting takes no longer than computing, except for one step.

        If both compute, the rest of the common prefix takes twice as many steps as for one request
        alone; if one waits, the other must first reach these tokens.
        """
        behind = num_computed_tokens - int(awaited.request.num_computed_tokens)
        return behind <= max(awaited.num_tokens - num_computed_tokens, self._step_tokens)

    def _is_stalled(self, tracked: TrackedRequest, other: Any) -> bool:
        """Return whether the other request got no tokens in the last few steps."""
        progress = other.request_id, int(other.num_computed_tokens)
        tracked.num_stalled = tracked.num_stalled + 1 if progress == tracked.awaited else 0
        tracked.awaited = progress
        return tracked.num_stalled >= MAX_STALLED

    def _awaited(self, request: Any, other: Any) -> Awaited:
        """Return the common prefix of two prompts, computed only once for each pair."""
        held = self._held_back.get(request.request_id)
        if held is not None and held.request is other:
            return held
        own, others = request.block_hashes, other.block_hashes
        most = min(self._blocks.num_restorable(request), len(others))
        alike = bisect_left(range(most), True, key=lambda x: bool(own[x] != others[x]))
        return Awaited(other, alike * self._blocks.block_tokens)

    def _computes(self, request: Any, end: int, wanted: bytes) -> bool:
        """True if the request runs, and has yet to compute block ``end - 1``, with this hash."""
        hashes = request.block_hashes
        return bool(
            request.status.name == "RUNNING"
            and request.num_computed_tokens < end * self._blocks.block_tokens
            and len(hashes) >= end
            and hashes[end - 1] == wanted
        )
