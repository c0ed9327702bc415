"""The names of ways to pack rows of windows and recurrent states; imports nothing heavy."""

from __future__ import annotations

from typing import Final, NamedTuple


class StateEntry(NamedTuple):
    """A way to pack matrices of recurrent states.

    ``bits``: for each value, without scales. ``learns``: it needs values learned from the model.
    """

    bits: int
    sentence: str
    learns: bool = False


# Joined to a preset of rows by a plus, as in ``dense3+window4``; without it, the preset itself
# packs rows of windows. These rows are few, and the tokens that follow attend to them most.
WINDOWS: Final[dict[str, str]] = {"window4": "tq4"}  # the codec of windows' rows
# Joined in the same way, as in ``dense3+state8``; without it states stay exact.
STATES: Final[dict[str, StateEntry]] = {
    "state16": StateEntry(16, "Rounds recurrent states to bf16."),
    "state8": StateEntry(8, "Recurrent states in 8 bits with a scale for each row."),
    "state6": StateEntry(6, "Recurrent states in 6 bits with a scale for each row."),
    "state4": StateEntry(4, "Recurrent states in 4 bits with a scale for each row."),
    "dealt6": StateEntry(6, "6 bits on average, dealt over rows by what errors cost.", True),
    "dealt5": StateEntry(5, "5 bits on average, dealt over rows by what errors cost.", True),
    "dealt4": StateEntry(4, "4 bits on average, dealt over rows by what errors cost.", True),
}
USUAL_STATES: Final = "state8"  # for a preset that names no way
WORST: Final = "state4"  # not measured if bits can be dealt
