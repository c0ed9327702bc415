"""The spans of a session's chain of tokens; each is one blob."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.blobs.chain import CHUNK, PART, SNAPSHOT, TAIL


class Span(NamedTuple):
    """A blob of a session: a full chunk, the tail after them, a part of a block, or a state.

    It has the rows of ``num_tokens`` tokens from ``first_token`` on. A state was taken after the
    last of them; it has the rows since the last full chunk, or none. Positions in blocks are for
    engines that have blocks; a part of a block covers none.
    """

    key: bytes
    first_token: int
    num_tokens: int
    block_tokens: int = 1

    @property
    def end_token(self) -> int:
        """The index after its last token."""
        return self.first_token + self.num_tokens

    @property
    def first_block(self) -> int:
        return self.first_token // self.block_tokens

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.block_tokens

    @property
    def end_block(self) -> int:
        return self.end_token // self.block_tokens

    @property
    def is_chunk(self) -> bool:
        return self.key[:1] == CHUNK

    @property
    def is_tail(self) -> bool:
        return self.key[:1] == TAIL

    @property
    def is_part(self) -> bool:
        return self.key[:1] == PART

    @property
    def is_state(self) -> bool:
        return self.key[:1] == SNAPSHOT


def in_order(rows: Sequence[Span], states: Sequence[Span]) -> list[Span]:
    """Order a session's spans by importance: the newest state, the rows, the older states.

    That is the order of use: evicting from the end loses the least. Nothing can be restored without
    a state. A turn that continues the answer needs only the newest, so under pressure the older
    ones, which are large, are evicted first.

    Args:
        states: the newest first.
    """
    return [*states[:1], *rows, *states[1:]]
