"""Range asymmetric numeral systems (Duda, arXiv 1311.2540), eight lanes side by side.

A lane's state is a number of 32 bits. Coding a symbol of frequency f (of 4096) multiplies it by
4096 / f; when it grows too large, its lower 16 bits become a word of the stream. Eight lanes hide
each other's latency: symbol ``t`` of a row belongs to lane ``t % 8``, and the words of all lanes
share one stream, in the order in which the decoder reads them.

The stream is the eight final states (u32), then the words (u16), little-endian. Decoding is defined
here in numpy; ``compiled_rans`` decodes the same a hundred times faster, and encodes. A test
compares its bytes with those of an encoder in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Final, TypeAlias

import numpy as np

from kvstore.codecs.entropy.tables import PRECISION, TOTAL, SymbolTables
from kvstore.codecs.loops.compiled import compiled_module
from kvstore.errors import Corrupt

COMPILED: Final = "kvstore.codecs.entropy.compiled_rans"
LANES = 8
LOWEST = 1 << 16  # a state lies in LOWEST .. LOWEST << 16
HEAD_BYTES = 4 * LANES

# Arguments: words, classes; symbols, frequencies and starts of the tables; states; symbols to fill.
Decoder: TypeAlias = Callable[..., int]


def compiled_rans() -> ModuleType | None:
    """Returns the compiled coder; None without numba."""
    return compiled_module(COMPILED)


def encode(symbols: np.ndarray, classes: np.ndarray, tables: SymbolTables) -> bytes:
    """Codes ``symbols``, uint8 (rows, tokens), none above the escape of its row's class.

    ``classes``: int64 (rows,). Only where ``compiled_rans`` returns a coder.
    """
    compiled = compiled_rans()
    assert compiled is not None
    states = np.full(LANES, LOWEST, np.uint32)
    words = np.empty(symbols.size + LANES, np.uint16)  # a symbol adds at most one word
    first = compiled.encode(
        np.ascontiguousarray(symbols), classes, tables.frequencies, tables.starts, states, words
    )
    return states.astype("<u4").tobytes() + words[first:].astype("<u2").tobytes()


def decode(
    stream: np.ndarray,
    classes: np.ndarray,
    num_tokens: int,
    tables: SymbolTables,
    run: Decoder | None = None,
) -> np.ndarray:
    """Decodes a whole stream, uint8 (nbytes,), to uint8 (rows, num_tokens).

    ``run``: the decoder; by default the fastest.

    Raises:
        Corrupt: ``encode`` did not write the stream for so many symbols.
    """
    if len(stream) < HEAD_BYTES or len(stream) % 2:
        raise Corrupt(f"an entropy-coded stream of {len(stream)} bytes")
    states = stream[:HEAD_BYTES].view("<u4").astype(np.uint32)
    words = stream[HEAD_BYTES:].view("<u2").astype(np.uint16)
    symbols = np.empty((len(classes), num_tokens), np.uint8)
    known = (tables.symbols, tables.frequencies, tables.starts)
    used = (run or decoder())(words, classes, *known, states, symbols)
    if used != len(words) or np.any(states != LOWEST):
        raise Corrupt("an entropy-coded stream does not end where it should")
    return symbols


def decode_reference(
    words: np.ndarray,
    classes: np.ndarray,
    table: np.ndarray,
    frequencies: np.ndarray,
    starts: np.ndarray,
    states: np.ndarray,
    symbols: np.ndarray,
) -> int:
    """Fills ``symbols``, and writes the final states to ``states``.

    Returns the number of words used, or -1 if there are too few.
    """
    used = 0
    for row, number in enumerate(classes):
        for at in range(0, symbols.shape[1], LANES):
            state = states[: symbols.shape[1] - at].astype(np.uint64)
            slot = state & np.uint64(TOTAL - 1)
            block = table[number, slot]
            symbols[row, at : at + LANES] = block
            state = frequencies[number, block] * (state >> np.uint64(PRECISION))
            state += slot - starts[number, block]
            low = np.flatnonzero(state < LOWEST)
            if used + len(low) > len(words):
                return -1
            state[low] = state[low] << np.uint64(16) | words[used : used + len(low)]
            used += len(low)
            states[: len(block)] = state
    return used


def decoder() -> Decoder:
    """Returns the fastest decoder on this host."""
    compiled = compiled_rans()
    return decode_reference if compiled is None else compiled.decode
