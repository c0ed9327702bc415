"""Chooses the states to keep of a session whose cache cannot be cut back to an earlier token.

A state (recurrent layers, sliding windows) is as large as thousands of packed tokens, so a session
keeps as few as returning needs. The newest serves the turn that continues the answer. The one
before the answer serves a chat template that drops the model's reasoning, an answer that is
generated again, and a last message that is edited. A return to an earlier point costs a
prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

STATES_PER_SESSION: Final = 2


def kept_states(positions: Iterable[int], most: int) -> tuple[int, ...]:
    """Choose the states to keep: the newest ``most`` positions, ascending."""
    return tuple(sorted(set(positions)))[-most:]


def by_worth(positions: Iterable[int]) -> list[int]:
    """Order positions of states by importance: the newest first."""
    return sorted(set(positions), reverse=True)
