"""The groups that vLLM sorts a model's layers into, and what each of them must have at a boundary.

Layers with full attention keep all tokens; their blocks are what the rest of the plug-in is about.
Other layers keep less: a recurrent one its state, in one block; one with a sliding window the
blocks that the window still reaches. What they hold behind a block is called the *state* there. A
restore needs the blocks of the first kind up to some boundary, and the state at just that one.

vLLM keeps one table of blocks per group, and the numbers of all tables are of one pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

# In tables of groups that do not keep all tokens: there is no block. vLLM's ``null_block``.
NULL_BLOCK: Final = 0
# In a list of a state's blocks: this one is held already, and others may be reading it.
IN_USE: Final = -1


class CachedBlocks(Protocol):
    """As much of ``vllm.v1.core.block_pool.BlockPool`` as is needed to find blocks by hash."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any: ...


@dataclass(frozen=True)
class StateGroup:
    """A group whose layers keep the last ``num_blocks`` blocks and no more.

    ``form``: of a recurrent layer's bytes. States are exchanged only where it is the same.
    """

    id: int
    layers: tuple[str, ...]
    num_blocks: int
    recurrent: bool
    form: str = ""

    def reach(self, boundary: int) -> range:
        """Which blocks are the state behind ``boundary`` blocks."""
        return range(max(0, boundary - self.num_blocks), boundary)


@dataclass(frozen=True)
class Groups:
    """``full``: id of the group that keeps all tokens."""

    full: int
    layers: tuple[str, ...]
    states: tuple[StateGroup, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [self.full, *(x.id for x in self.states)]

    def state_blocks(
        self, tables: Sequence[Sequence[int]], boundary: int, first_block: int
    ) -> list[int]:
        """Where the state behind ``boundary`` goes, for a request with these tables of blocks.

        Blocks before ``first_block`` are ``IN_USE``.
        """
        return [
            tables[group.id][i] if i >= first_block else IN_USE
            for group in self.states
            for i in group.reach(boundary)
        ]

    def held_states(
        self, pool: CachedBlocks, hashes: Sequence[bytes], boundaries: Iterable[int]
    ) -> dict[int, list[int]]:
        """Behind the first of each of ``boundaries`` that vLLM still has: its blocks."""
        for boundary in boundaries:
            blocks = self._held(pool, hashes, boundary)
            if blocks is not None:
                return {boundary: blocks}
        return {}

    def states_to_keep(
        self, pool: CachedBlocks, hashes: Sequence[bytes], num_prompt_blocks: int
    ) -> dict[int, list[int]]:
        """The newest, and the last before the answer: templates may change what was answered."""
        newest, before = (
            self.held_states(pool, hashes, range(n, 0, -1))
            for n in (len(hashes), num_prompt_blocks)
        )
        return before | newest

    def _held(self, pool: CachedBlocks, hashes: Sequence[bytes], boundary: int) -> list[int] | None:
        blocks: list[int] = []
        for group in self.states:
            for i in group.reach(boundary):
                found = pool.get_cached_block(hashes[i], [group.id])
                if not found:
                    return None
                blocks.append(found[0].block_id)
        return blocks


DENSE: Final = Groups(0, ())
