"""What the half beside vLLM's scheduler wants done in the workers, step by step.

Free of vLLM, so that both halves can be tried without it; ``metadata`` makes it travel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.records import SessionRef


@dataclass(frozen=True)
class Save:
    """At the end of a turn. ``block_ids`` are held for the workers until every one of them acks."""

    job: int
    session: SessionRef
    hashes: list[bytes]
    block_ids: list[int]


@dataclass(frozen=True)
class Load:
    """Blocks ``first_block ..`` of the prompt, out of what is staged under ``ticket``."""

    ticket: int
    request_id: str
    first_block: int
    block_ids: list[int]


@dataclass
class Step:
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    patience_s: float = 0.0  # how long workers may wait for news, if the model has nothing to do
