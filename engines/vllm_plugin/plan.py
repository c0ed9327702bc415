"""What the half beside vLLM's scheduler wants done in the workers, step by step.

Free of vLLM, so that both halves can be tried without it; ``metadata`` makes it travel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.records import SessionRef


@dataclass(frozen=True)
class Save:
    """At the end of a turn. All blocks are held for the workers until every one of them acks.

    ``states``: after how many blocks a state is held, and in which blocks (``groups``).
    ``part``: ids of the tokens behind the last full block; ``block_ids`` then has one block more,
    of which these rows alone are the session's.
    ``waits``: it is not skipped, however much waits already.
    """

    job: int
    session: SessionRef
    hashes: list[bytes]
    block_ids: list[int]
    states: dict[int, list[int]] = field(default_factory=dict)
    part: tuple[int, ...] = ()
    waits: bool = False

    @property
    def held_ids(self) -> list[int]:
        """A state stands behind the blocks that it is of no use without."""
        ids = []
        for end, block_id in enumerate(self.block_ids, 1):
            ids += [block_id, *self.states.get(end, ())]
        return ids


@dataclass(frozen=True)
class Load:
    """Blocks ``first_block ..`` of the prompt, out of what is staged under ``ticket``.

    ``state_ids``: where the state behind the last of them goes (``groups``).
    ``part_tokens``: of one block more, the last of ``block_ids``, so many rows.
    """

    ticket: int
    request_id: str
    first_block: int
    block_ids: list[int]
    state_ids: list[int] = field(default_factory=list)
    part_tokens: int = 0

    @property
    def end_block(self) -> int:
        """Behind the last full one."""
        return self.first_block + len(self.block_ids) - bool(self.part_tokens)


@dataclass
class Step:
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    patience_s: float = 0.0  # how long workers may wait for news, if the model has nothing to do
