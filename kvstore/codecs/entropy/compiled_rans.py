"""rANS as numba functions; see ``rans`` for the format.

The functions release the GIL. They check every index that a stream can influence: a slot is below
4096 by construction, a symbol comes from a table of the profile, and words are counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvstore.codecs.entropy.tables import PRECISION, TOTAL
from kvstore.codecs.loops.numba_functions import array_of, compiled

LANES = 8
LOWEST = 1 << 16


def _encode(
    symbols: Any, classes: Any, frequencies: Any, starts: Any, states: Any, words: Any
) -> int:
    """Writes words from the end of ``words`` towards its start, and the final states to ``states``.

    Returns the index of the first word.
    """
    at = len(words)
    for row in range(symbols.shape[0] - 1, -1, -1):
        frequency, start = frequencies[classes[row]], starts[classes[row]]
        for token in range(symbols.shape[1] - 1, -1, -1):
            symbol = symbols[row, token]
            state = np.uint64(states[token % LANES])
            share = np.uint64(frequency[symbol])
            if state >= share << np.uint64(32 - PRECISION):
                at -= 1
                words[at] = np.uint16(state & np.uint64(0xFFFF))
                state >>= np.uint64(16)
            quotient = np.uint64(np.uint32(state) // np.uint32(share))
            rest = state - quotient * share
            states[token % LANES] = np.uint32(
                (quotient << np.uint64(PRECISION)) + rest + np.uint64(start[symbol])
            )
    return at


def _decode(
    words: Any, classes: Any, table: Any, frequencies: Any, starts: Any, states: Any, symbols: Any
) -> int:
    """Fills ``symbols``, and writes the final states to ``states``.

    Returns the number of words used, or -1 if there are too few.
    """
    used = 0
    num_words = len(words)
    lanes = np.empty(LANES, np.uint32)
    for lane in range(LANES):  # to assign one array to another takes numba two seconds to compile
        lanes[lane] = states[lane]
    for row in range(symbols.shape[0]):
        number = classes[row]
        slots, frequency, start = table[number], frequencies[number], starts[number]
        for token in range(symbols.shape[1]):
            state = lanes[token % LANES]
            slot = state & np.uint32(TOTAL - 1)
            symbol = slots[slot]
            symbols[row, token] = symbol
            state = np.uint32(frequency[symbol]) * (state >> np.uint32(PRECISION)) + (
                slot - start[symbol]
            )
            if state < np.uint32(LOWEST):
                if used == num_words:
                    return -1
                state = (state << np.uint32(16)) | np.uint32(words[used])
                used += 1
            lanes[token % LANES] = state
    for lane in range(LANES):
        states[lane] = lanes[lane]
    return used


_CLASSES = array_of(types.int64, 1)
_TABLES = (array_of(types.uint16, 2), array_of(types.uint32, 2))
_STATES = array_of(types.uint32, 1)
_WORDS = array_of(types.uint16, 1)
_SYMBOLS = array_of(types.uint8, 2)

encode = compiled(types.int64, _encode, _SYMBOLS, _CLASSES, *_TABLES, _STATES, _WORDS)
decode = compiled(types.int64, _decode, _WORDS, _CLASSES, _SYMBOLS, *_TABLES, _STATES, _SYMBOLS)
