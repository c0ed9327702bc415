"""The groups that vLLM sorts a model's layers into, and the blocks of each that a restore needs.

Layers with full attention keep all tokens; the rest of the plug-in is about their blocks. Other
layers keep less: a recurrent layer keeps its state, in one block; a layer with a sliding window
keeps the blocks that the window still reaches. The contents of such layers after a given number of
blocks are called the *state* at this *boundary*. A restore needs the blocks of full attention up to
some boundary, and the state at exactly this boundary.

vLLM keeps one table of block ids per group; the ids of all tables belong to one pool.

The ``repr`` of these classes enters the fingerprint of models with states: do not rename them or
their fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# The id of vLLM's ``null_block``: "no block" in tables of groups that do not keep all tokens.
NULL_BLOCK: Final = 0
# Marks, in a list of a state's blocks, one that is already filled and that other requests may read.
IN_USE: Final = -1


@dataclass(frozen=True)
class StateGroup:
    """A group whose layers keep only the last ``num_blocks`` blocks."""

    id: int
    layers: tuple[str, ...]
    num_blocks: int
    recurrent: bool
    form: str = ""  # the shapes and dtypes of a recurrent layer's state

    def reach(self, boundary: int) -> range:
        """Return the numbers of the blocks that form the state at ``boundary``."""
        return range(max(0, boundary - self.num_blocks), boundary)


@dataclass(frozen=True)
class Groups:
    """The group that keeps all tokens, and those that do not."""

    full: int  # id of the group that keeps all tokens
    layers: tuple[str, ...]  # its layers' names
    states: tuple[StateGroup, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [self.full, *(x.id for x in self.states)]

    def state_blocks(
        self, tables: Sequence[Sequence[int]], boundary: int, first_block: int
    ) -> list[int]:
        """Return the ids of the blocks that receive the state at ``boundary``, group after group.

        ``tables``: the request's block ids, by group. Blocks before ``first_block`` are ``IN_USE``.
        """
        return [
            tables[group.id][i] if i >= first_block else IN_USE
            for group in self.states
            for i in group.reach(boundary)
        ]


DENSE: Final = Groups(0, ())
