"""What the budget for live KV is good for, counted as the engine counts it.

mlx_lm pays out of it for work, too: a running row has room to grow, and exists twice for a moment
when it joins or leaves a batch. The other engines' pools hold KV and nothing else.

Both cut the model's context down to what fits. vLLM ends where a context that was asked for by
number does not fit, so that is refused before it is started.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from engines.kv_budget import SMALLEST_CONTEXT, KVCost, alone_bytes, too_little
from launch.cache_shape import CacheShape


@dataclass(frozen=True)
class HotRoom:
    """``itemsize``: bytes of one element of the live cache. ``wanted``: tokens, the longest context
    that the model or the settings allow. ``asked_for``: it is a number out of the settings."""

    shape: CacheShape
    itemsize: int
    hot_bytes: int
    wanted: int
    pays_for_work: bool  # the engine is mlx_lm
    asked_for: bool = False
    packed: KVCost | None = None  # the cache is kept packed while it is live

    def idle_bytes(self, num_tokens: int) -> int:
        """Of a session between its turns; never 0."""
        if self.packed is not None:
            return max(1, self.packed.idle_bytes(num_tokens))
        return max(1, self.shape.hot_bytes(num_tokens, self.itemsize))

    def running_bytes(self, num_tokens: int) -> int:
        """Of a session that is being answered, alone."""
        if self.pays_for_work:
            return alone_bytes(self._cost, num_tokens)
        return self.idle_bytes(num_tokens)

    def longest_context(self) -> int:
        """Tokens, prompt and answer; what is longer is refused by the engine."""
        return bisect_right(range(1, self.wanted + 1), self.hot_bytes, key=self.running_bytes)

    def sessions(self, num_tokens: int) -> int:
        """How many of this length can be hot while one of them, any one, is being answered."""
        left = self.hot_bytes - self.running_bytes(num_tokens)
        return 0 if left < 0 else 1 + left // self.idle_bytes(num_tokens)

    def refusal(self) -> str:
        """Why the engine would not start with this budget; "" if it would."""
        if self.pays_for_work:
            return too_little(self._cost, self.hot_bytes, self.wanted)
        smallest = self.wanted if self.asked_for else min(self.wanted, SMALLEST_CONTEXT)
        least = self.idle_bytes(smallest)
        if least <= self.hot_bytes:
            return ""
        return (
            f"hot_bytes = {self.hot_bytes} is too little: one context of {smallest} tokens takes"
            f" {-(-least >> 20)} MiB of vLLM's pool; give it that or more (--hot)"
            + (", or lower engine.max_context" if self.asked_for else "")
        )

    @property
    def _cost(self) -> KVCost:
        return self.packed or self.shape.cost(self.itemsize)
