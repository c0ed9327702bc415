"""Lets a request wait while another one is being prefilled with the same beginning of a prompt.

vLLM offers a block to others as soon as the step that computes it is planned. But a request that
runs does not look for such blocks again: requests that begin alike and are let in together compute
the rest of it side by side. So a request is held back while a running one will compute its next
chunk; then it starts where that one is, by vLLM's own prefix cache.

A running request comes before new ones in every step, and gets as many tokens as any of them would.
So waiting for it takes no more steps than computing beside it, save one step for each piece that
several would compute in the same one. A request that is passed over, aborted or preempted is waited
for no longer. Only running requests are waited for, and those wait for nothing: there is no circle.
"""

from __future__ import annotations

from typing import Any, Final

from engines.vllm_plugin.scheduler.tracked_request import TokenBlocks, TrackedRequest

# Steps in a row in which the running request may get no tokens.
MAX_STALLED: Final = 4


class PrefillsInFlight:
    """The requests whose prompts vLLM computes now. All methods run on vLLM's thread."""

    def __init__(self, blocks: TokenBlocks) -> None:
        self._blocks = blocks
        self._prefilled: dict[str, Any] = {}  # vLLM's requests by id

    def begin(self, request: Any) -> None:
        """Note that vLLM has set blocks aside for this request."""
        self._prefilled[request.request_id] = request

    def end(self, request_id: str) -> None:
        """Forget a request that has ended; any request may be named."""
        self._prefilled.pop(request_id, None)

    def forget_computed(self) -> None:
        """Forget the requests whose prompts are computed."""
        for request_id, request in list(self._prefilled.items()):
            if request.num_computed_tokens >= request.num_tokens - 1:
                del self._prefilled[request_id]

    def computes_next(self, tracked: TrackedRequest, num_computed_tokens: int) -> bool:
        """True if a running request will compute the chunk after these tokens.

        vLLM asks once a step; this compares one hash with every prompt that is being computed. The
        hash of a block covers all tokens before it, the tenant's salt and the adapter.
        """
        if not self._prefilled or tracked.request.skip_reading_prefix_cache:
            return False
        end = num_computed_tokens // self._blocks.block_tokens + self._blocks.chunk_blocks
        if end > self._blocks.num_restorable(tracked.request):
            return False
        wanted = tracked.request.block_hashes[end - 1]
        found = next((x for x in self._prefilled.values() if self._computes(x, end, wanted)), None)
        if found is None:
            return False
        progress = found.request_id, int(found.num_computed_tokens), num_computed_tokens
        tracked.num_stalled = tracked.num_stalled + 1 if progress == tracked.awaited else 0
        tracked.awaited = progress
        return tracked.num_stalled < MAX_STALLED

    def _computes(self, request: Any, end: int, wanted: bytes) -> bool:
        """True if the request runs, and has yet to compute block ``end - 1``, with this hash."""
        hashes = request.block_hashes
        return bool(
            request.status.name == "RUNNING"
            and request.num_computed_tokens < end * self._blocks.block_tokens
            and len(hashes) >= end
            and hashes[end - 1] == wanted
        )
