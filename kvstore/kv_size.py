"""The bytes of a session's KV in memory, as an engine reports them."""

from __future__ import annotations

import msgspec


class KVSize(msgspec.Struct, frozen=True):
    """The bytes that a session's KV takes, by its tokens. Sizes of several parts add up."""

    per_token: int = 0  # in layers that keep every token
    windows: tuple[tuple[int, int], ...] = ()  # bytes per token, and of so many tokens at most
    fixed: int = 0  # recurrent states

    def of(self, num_tokens: int) -> int:
        """Count the bytes of a session of ``num_tokens``."""
        windows = sum(nbytes * min(num_tokens, longest) for nbytes, longest in self.windows)
        return self.per_token * num_tokens + windows + (self.fixed if num_tokens else 0)

    def __add__(self, other: KVSize) -> KVSize:
        return KVSize(
            self.per_token + other.per_token, self.windows + other.windows, self.fixed + other.fixed
        )
