"""Range asymmetric numeral systems (Duda, arXiv 1311.2540), 32 lanes side by side.

A lane's state is a number of 32 bits. Coding a symbol of frequency f (of 4096) multiplies it by
4096 / f; when it grows too large, its lower 16 bits become a word of the stream. The lanes hide
each other's latency, and fill vectors: symbol ``t`` of a row belongs to lane ``t % 32``, and the
words of all lanes share one stream, in the order in which the decoder reads them.

The stream is the 32 final states (u32), then the words (u16), little-endian. Both ways are defined
here in numpy; ``kernels.units.rans_rows`` gives the same bytes hundreds of times faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from kvstore.codecs.entropy.tables import (
    NUM_CLASSES,
    PRECISION,
    TOTAL,
    SymbolTables,
    fit_tables,
)
from kvstore.codecs.loops.compiled import compiled_module, proven
from kvstore.errors import Corrupt

COMPILED: Final = "kvstore.codecs.kernels.units.rans_rows"
LANES = 32
LOWEST = 1 << 16  # a state lies in LOWEST .. LOWEST << 16
HEAD_BYTES = 4 * LANES
TRIED_TOKENS = 2 * LANES + 6  # of the rows by which compiled functions are compared

# Arguments: words, their number, classes, slots, states, outputs to fill, number of tokens.
Decoder: TypeAlias = Callable[..., int]
# Arguments: symbols, classes, coding of the tables, states, words to fill, number of tokens.
Encoder: TypeAlias = Callable[..., int]


def padded_tokens(num_tokens: int) -> int:
    """Return the length of a row in memory: whole vectors of lanes."""
    return -(-num_tokens // LANES) * LANES


def encode(
    symbols: np.ndarray,
    num_tokens: int,
    classes: np.ndarray,
    tables: SymbolTables,
    run: Encoder | None = None,
) -> bytes:
    """Code ``symbols``, none above the escape of its row's class.

    ``symbols``: uint8 (rows, padded tokens), contiguous. ``classes``: int64 (rows,). ``run``: the
    encoder; by default the fastest.
    """
    states = np.full(LANES, LOWEST, np.uint32)
    # A symbol adds at most one word; vectors are stored whole.
    words = np.empty(len(classes) * num_tokens + LANES, np.uint16)
    run = run or _fastest()[0]
    count = run(symbols, classes, tables.coding, states, words, num_tokens)
    backwards: np.ndarray = words[:count][::-1]
    return states.astype("<u4").tobytes() + backwards.astype("<u2").tobytes()


def decode(
    stream: np.ndarray,
    classes: np.ndarray,
    num_tokens: int,
    slots: np.ndarray,
    run: Decoder | None = None,
) -> np.ndarray:
    """Decode a whole stream, uint8 (nbytes,), to uint8 (rows, padded tokens).

    ``slots``: of ``SymbolTables``. ``run``: the decoder; by default the fastest.

    Raises:
        Corrupt: ``encode`` did not write the stream for so many symbols.
    """
    if len(stream) < HEAD_BYTES or len(stream) % 2:
        raise Corrupt(f"an entropy-coded stream of {len(stream)} bytes")
    states = stream[:HEAD_BYTES].view("<u4").astype(np.uint32)
    num_words, row = (len(stream) - HEAD_BYTES) // 2, padded_tokens(num_tokens)
    # A row that reads beyond the end reads zeros: at most one for each symbol, in whole vectors.
    words = np.zeros(num_words + row + LANES, np.uint16)
    words[:num_words] = stream[HEAD_BYTES:].view("<u2")
    found = np.empty((len(classes), row), np.uint8)
    run = run or _fastest()[1]
    used = run(words, num_words, classes, slots, states, found, num_tokens)
    if used != num_words or np.any(states != LOWEST):
        raise Corrupt("an entropy-coded stream does not end where it should")
    return found


@functools.cache
def _fastest() -> tuple[Encoder, Decoder]:
    """Return the compiled functions, if they give the bytes of the definition."""
    module = compiled_module(COMPILED)
    compiled = (module.encode, module.decode) if module is not None else None
    definition = (encode_reference, decode_reference)
    return proven(compiled, definition, agree, "the functions of the entropy coder")


def agree(functions: tuple[Encoder, Decoder]) -> bool:
    """Return whether an encoder and a decoder code some rows as the definition does."""
    run_encoder, run_decoder = functions
    tables, classes = fit_tables([]), np.arange(1, NUM_CLASSES, dtype=np.int64)
    most = tables.escapes[classes].astype(np.int64)[:, None]
    shape = len(classes), padded_tokens(TRIED_TOKENS)
    symbols = (np.random.default_rng(0).integers(0, 1 << 16, shape) % (most + 1)).astype(np.uint8)
    known = symbols, TRIED_TOKENS, classes, tables
    stream = encode(*known, encode_reference)
    found = np.frombuffer(stream, np.uint8), classes, TRIED_TOKENS, tables.slots()
    restored = decode(*found, run_decoder)[:, :TRIED_TOKENS]
    exact = np.array_equal(restored, symbols[:, :TRIED_TOKENS])
    return exact and encode(*known, run_encoder) == stream


def encode_reference(
    symbols: np.ndarray,
    classes: np.ndarray,
    coding: np.ndarray,
    states: np.ndarray,
    words: np.ndarray,
    num_tokens: int,
) -> int:
    """Write words, the last one first, and the final states; return the number of words."""
    used = 0
    for row in range(len(classes) - 1, -1, -1):
        for at in range((num_tokens - 1) // LANES * LANES, -1, -LANES):
            state = states[: num_tokens - at].astype(np.uint64)
            entries = coding[classes[row], symbols[row, at : at + len(state)]].astype(np.uint64)
            shares = entries & np.uint64(0xFFFF)
            full = np.flatnonzero(state >= shares << np.uint64(32 - PRECISION))[::-1]
            words[used : used + len(full)] = state[full] & np.uint64(0xFFFF)
            used += len(full)
            state[full] >>= np.uint64(16)
            quotients, rest = np.divmod(state, shares)
            coded = (quotients << np.uint64(PRECISION)) + rest + (entries >> np.uint64(16))
            states[: len(state)] = coded
    return used


def decode_reference(
    words: np.ndarray,
    num_words: int,
    classes: np.ndarray,
    slots: np.ndarray,
    states: np.ndarray,
    found: np.ndarray,
    num_tokens: int,
) -> int:
    """Fill ``found``, and write the final states to ``states``.

    Returns the number of words used, or -1 if there are too few.
    """
    used = 0
    for row, number in enumerate(classes):
        for at in range(0, num_tokens, LANES):
            state = states[: num_tokens - at].astype(np.uint64)
            entries = slots[number, state & np.uint64(TOTAL - 1)].astype(np.uint64)
            found[row, at : at + len(state)] = entries >> np.uint64(24)
            state = (entries >> np.uint64(PRECISION) & np.uint64(TOTAL - 1)) * (
                state >> np.uint64(PRECISION)
            )
            state += entries & np.uint64(TOTAL - 1)
            low = np.flatnonzero(state < LOWEST)
            state[low] = state[low] << np.uint64(16) | words[used : used + len(low)]
            used += len(low)
            states[: len(state)] = state
        if used > num_words:
            return -1
    return used
