"""The saves and loads that the scheduler side orders from the workers, step by step.

The connector sends them (``connector.StepPlan``). Block ids are those of vLLM's tables; a state's
are those of all groups that do not keep all tokens, joined (``groups``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.session import SessionRef


@dataclass(frozen=True)
class Save:
    """The save of a session at the end of its turn.

    All its blocks are held until every worker has acknowledged it.

    Attributes:
        hashes: the hashes of the blocks of the session's full chunks, from its beginning.
        states: the ids of each held state's blocks, by the number of blocks before it.
        waits: the save is never skipped, even if many saves wait already.
        ids: the ids of the blocks' tokens, if KV events are reported (``inventory.event_note``).
    """

    job: int
    session: SessionRef
    hashes: list[bytes]
    block_ids: list[int]
    states: dict[int, list[int]] = field(default_factory=dict)
    waits: bool = False
    ids: bytes = b""

    @property
    def held_ids(self) -> list[int]:
        """Ids of all held blocks; a state follows the blocks before its boundary."""
        ids = []
        for end, block_id in enumerate(self.block_ids, 1):
            ids += [block_id, *self.states.get(end, ())]
        return ids


@dataclass(frozen=True)
class Load:
    """The load of a prompt's blocks from ``first_block`` on, from a ticket's staged blobs."""

    ticket: int
    request_id: str
    first_block: int
    block_ids: list[int]
    state_ids: list[int] = field(default_factory=list)  # blocks of the state after them

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.block_ids)


@dataclass(frozen=True)
class Given:
    """The load of blocks with the KV that a measurement has prepared for one of its requests."""

    request_id: str
    number: int  # of the order
    block_ids: list[int]
    state_ids: list[int] = field(default_factory=list)  # blocks of the state after them


@dataclass(frozen=True)
class WantedBlocks:
    """The blocks whose KV a measurement reads. They are held until every rank has read them."""

    job: int
    number: int  # of the order
    block_ids: list[int]
    boundary: int = 0  # the number of blocks before the state
    state_ids: list[int] = field(default_factory=list)  # []: none, or vLLM did not keep it


@dataclass
class StepWork:
    """The work of all ranks in one step of vLLM."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    given: list[Given] = field(default_factory=list)
    wanted: list[WantedBlocks] = field(default_factory=list)
    alone: int = 0  # number of the measurement's order, if the model computes nothing else
    wait_s: float = 0.0  # how long a worker may wait for transfers, if the model has no work
