"""rANS in numba; see ``entropy.rans`` for the format, and ``emit.rans`` for AVX-512.

The functions release the GIL. A slot is below 4096 by construction, bytes come from a table of the
profile, and words are counted after every row: the caller appends as many as a row can read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvstore.codecs.entropy.rans import LANES, LOWEST
from kvstore.codecs.entropy.tables import PRECISION, TOTAL
from kvstore.codecs.kernels.emit import rans
from kvstore.codecs.kernels.units.kernel_parts import HOST, plain
from kvstore.codecs.loops.numba_functions import address_of, compiled, sources_of

SOURCES = sources_of(__file__)

VECTORS = HOST.lanes == rans.VECTOR
_decoded_row: Any = plain(rans.emit_decoded_row)
_coded_row: Any = plain(rans.emit_coded_row)


@njit
def _decode_row(words: Any, used: Any, slots: Any, states: Any, found: Any, num_tokens: Any) -> Any:
    """Decode one row, and return the number of words used so far."""
    for token in range(num_tokens):
        state = states[token % LANES]
        entry = slots[state & np.uint32(TOTAL - 1)]
        found[token] = np.uint8(entry >> np.uint32(24))
        frequency = (entry >> np.uint32(PRECISION)) & np.uint32(TOTAL - 1)
        state = np.uint32(frequency * (state >> np.uint32(PRECISION)))
        state = np.uint32(state + (entry & np.uint32(TOTAL - 1)))
        if state < np.uint32(LOWEST):
            state = np.uint32(state << np.uint32(16)) | np.uint32(words[used])
            used += 1
        states[token % LANES] = state
    return used


@njit
def _code_row(
    symbols: Any, entries: Any, states: Any, words: Any, used: Any, num_tokens: Any
) -> Any:
    """Code one row, from its end, and return the number of words so far."""
    for token in range(num_tokens - 1, -1, -1):
        entry, state = entries[symbols[token]], states[token % LANES]
        share = entry & np.uint32(0xFFFF)
        if np.uint64(state) >= np.uint64(share) << np.uint64(32 - PRECISION):
            words[used] = np.uint16(state & np.uint32(0xFFFF))
            used += 1
            state = np.uint32(state >> np.uint32(16))
        quotient = np.uint32(state // share)
        rest = np.uint32(state - np.uint32(quotient * share)) + (entry >> np.uint32(16))
        states[token % LANES] = np.uint32(quotient << np.uint32(PRECISION)) + np.uint32(rest)
    return used


def _functions(sources_digest: int) -> tuple[Any, Any]:
    """Make the functions; the digest is part of numba's cache key, which covers one file only."""

    def decode_rows(
        words: Any, num_words: int, classes: Any, slots: Any, states: Any, found: Any, count: int
    ) -> Any:
        """Fill ``found``; return the number of words used, or -1 if there are too few."""
        used, pointer = np.int64(0), np.empty(1, np.int64)
        pointer[0] = address_of(words)
        for row in range(len(classes)):
            if VECTORS:
                place = (address_of(slots[classes[row]]), address_of(found[row]), np.int64(count))
                _decoded_row(sources_digest, (address_of(states), address_of(pointer), *place))
                used = (pointer[0] - address_of(words)) // 2
            else:
                used = _decode_row(words, used, slots[classes[row]], states, found[row], count)
            if used > num_words:
                return -1
        return used

    def encode_rows(
        symbols: Any, classes: Any, coding: Any, states: Any, words: Any, count: int
    ) -> Any:
        """Put words, the last one first, and the final states; return the number of words."""
        used, pointer = np.int64(0), np.empty(1, np.int64)
        pointer[0] = address_of(words)
        for row in range(len(classes) - 1, -1, -1):
            if VECTORS:
                table, source = address_of(coding[classes[row]]), address_of(symbols[row])
                place = (address_of(pointer), table, source, np.int64(count))
                _coded_row(sources_digest, (address_of(states), *place))
                used = (pointer[0] - address_of(words)) // 2
            else:
                used = _code_row(symbols[row], coding[classes[row]], states, words, used, count)
        return used

    return decode_rows, encode_rows


_decode, _encode = _functions(SOURCES)
decode = compiled("i8", _decode, "u2:1 i8 i8:1 u4:2 u4:1 u1:2 i8")
encode = compiled("i8", _encode, "u1:2 i8:1 u4:2 u4:1 u2:1 i8")
