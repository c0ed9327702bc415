"""Prompts as a store of tokens and a store of blocks see them: see ``planner.Prompt``.

Tokens are compared one by one, and a tail belongs to its session alone. Blocks are compared by
their hashes, and a tail is found by content, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kvstore.blobs.chain import Chain, Tokens, common_prefix
from kvstore.store.block_keys import BlockKeys
from kvstore.store.records import BlockRecord, SessionRecord, common_blocks
from kvstore.store.spans import Span
from kvstore.store.token_keys import TokenKeys


class TokenPrompt:
    """A prompt of one tenant.

    Args:
        root: the start of the tenant's chains.
        boundaries: positions where a session may have left a state.
    """

    def __init__(
        self, keys: TokenKeys, root: bytes, tokens: Tokens, boundaries: Sequence[int]
    ) -> None:
        self._keys = keys
        self._root = root
        self._tokens = tokens
        self._boundaries = boundaries

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def common(self, record: SessionRecord) -> int | None:
        return common_prefix(record.tokens, self._tokens) if record.root == self._root else None

    def rows(self, record: SessionRecord) -> list[Span]:
        return self._keys.rows(self._keys.chain(record), record.tenant, record.id)

    def chunks(self, first_token: int) -> list[Span]:
        return self._keys.chunks(self._chain)[first_token // self._keys.space.chunk_tokens :]

    def tails(self, first_token: int, end_token: int) -> list[Span]:
        return []

    def states(self, own: Sequence[int], first_token: int) -> list[Span]:
        size = self._keys.space.chunk_tokens
        # Engines take a state at a boundary, or after the last full chunk before it.
        ends = {y for x in self._boundaries for y in (x, x - x % size)}
        found = {x for x in (*own, *ends) if first_token < x <= self.num_tokens}
        return [self._keys.state(self._chain, x) for x in sorted(found, reverse=True)]

    @cached_property
    def _chain(self) -> Chain:
        return self._keys.space.chain(self._root, self._tokens)


class BlockPrompt:
    """The hashes of a prompt's full blocks, which cover the tenant's salt."""

    def __init__(self, keys: BlockKeys, hashes: Sequence[bytes]) -> None:
        self._keys = keys
        self._hashes = hashes

    @property
    def num_tokens(self) -> int:
        return len(self._hashes) * self._keys.block_tokens

    def common(self, record: BlockRecord) -> int:
        return common_blocks(record.block_hashes, self._hashes) * self._keys.block_tokens

    def rows(self, record: BlockRecord) -> list[Span]:
        return self._keys.whole(record.block_hashes)

    def chunks(self, first_token: int) -> list[Span]:
        return self._keys.chunks(self._hashes, first_token // self._keys.block_tokens)

    def tails(self, first_token: int, end_token: int) -> list[Span]:
        size = self._keys.block_tokens
        return self._keys.tails(self._hashes[: end_token // size], first_token // size)

    def states(self, own: Sequence[int], first_token: int) -> list[Span]:
        first = first_token // self._keys.block_tokens
        return [self._keys.state(self._hashes, n) for n in range(len(self._hashes), first, -1)]
