"""Entropy-codes integers of known deviation: rANS with static tables, or deflate without numba.

    u8 method | rANS: u32 length, stream | deflate: u32 length, one byte for each symbol
    bit planes of the wide classes | u32 number of escapes, i32 each

Without numba, the coder writes deflate, which is 15 to 20 % longer, and reads rANS slowly.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.entropy import rans
from kvstore.codecs.entropy.tables import SymbolTables, plane_bits
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.errors import Corrupt

RANS, DEFLATE = 0, 1
DEAD = 0  # the class of components that are always zero
LARGEST_CODE = 1 << 24
ROUNDING = 0.9  # factor in the lower bound of symbols' bits: rANS rounds its states to integers


@dataclass(frozen=True, eq=False)
class Coded:
    """The symbols of components that are not dead, as a payload stores them.

    ``symbols`` and ``low`` (the lowest bits): uint8 (rows, tokens). ``rare``: the codes of escaped
    symbols, row by row, int32.
    """

    symbols: np.ndarray
    low: np.ndarray
    rare: np.ndarray


class ClassCoder:
    """Codes components with the tables of their classes. Implements ``Coder``."""

    def __init__(self, classes: np.ndarray, tables: SymbolTables) -> None:
        """``classes``: int64 (units, components)."""
        self._shape = classes.shape
        self._live = np.flatnonzero(classes.reshape(-1) != DEAD)
        self._classes = np.ascontiguousarray(classes.reshape(-1)[self._live], np.int64)
        self._tables = tables
        self._largest = tables.largest[self._classes].astype(np.int32)[:, None]
        self._escapes = tables.escapes[self._classes][:, None]
        self._low_bits = plane_bits(self._classes)[:, None].astype(np.int32)
        self._planes = BitPlanes(self._low_bits.T)
        self._bits = float(tables.bits()[self._classes].sum())
        symbols = float(tables.least_bits()[self._classes].sum())
        self._least_bits = ROUNDING * symbols + float(self._low_bits.sum())

    def write(self, codes: np.ndarray) -> bytes:
        rows = codes.swapaxes(1, 2).reshape(math.prod(self._shape), codes.shape[1])
        rows = rows[self._live].astype(np.int32)
        high = rows >> self._low_bits
        escaped = np.abs(high) > self._largest
        symbols = np.where(escaped, self._escapes, high + self._largest).astype(np.uint8)
        low = (rows & ((1 << self._low_bits) - 1)).astype(np.uint8)
        return self.write_coded(Coded(symbols, low, high[escaped]))

    def write_coded(self, coded: Coded) -> bytes:
        """Returns what ``write`` returns, for symbols instead of codes."""
        return b"".join(
            [
                self._write_symbols(coded.symbols),
                self._planes.write(coded.low.T[None]),
                count_bytes(len(coded.rare)),
                coded.rare.astype("<i4").tobytes(),
            ]
        )

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The indices of components that are not dead, int64 (rows,), and their alphabets.

        An alphabet is the largest symbol, the escape and the number of low bits, int32 (rows, 3).
        """
        known = (self._largest, self._escapes, self._low_bits)
        return self._live, np.concatenate(known, axis=1).astype(np.int32)

    def read_coded(self, reader: Reader, num_tokens: int) -> Coded:
        """Returns the symbols, from which ``read`` computes the codes.

        Raises:
            Corrupt: the payload is too short, or its symbols are invalid.
        """
        symbols = self._read_symbols(reader, num_tokens)
        low = self._planes.read(reader, num_tokens)[0].T
        escaped = symbols == self._escapes
        rare = reader.take("<i4", reader.count(symbols.size))
        too_large = np.abs(rare.astype(np.int64)) > LARGEST_CODE
        if len(rare) != np.count_nonzero(escaped) or np.any(too_large):
            raise Corrupt("escaped codes are not as many or as large as they can be")
        return Coded(symbols, low, rare.astype(np.int32))

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        coded = self.read_coded(reader, num_tokens)
        high = coded.symbols.astype(np.int32) - self._largest
        high[coded.symbols == self._escapes] = coded.rare
        units, components = self._shape
        codes = np.zeros((units * components, num_tokens), np.int32)
        codes[self._live] = (high << self._low_bits) + coded.low
        return codes.reshape(units, components, num_tokens).swapaxes(1, 2)

    def nbytes(self, num_tokens: int) -> int:
        """Returns the length that is expected by the tables."""
        return int(self._bits * num_tokens / 8) + 4 + 1 + rans.HEAD_BYTES + 4

    def least_nbytes(self, num_tokens: int) -> int:
        """Returns the length if every component had only its most frequent symbol, with planes.

        Deflate of equal codes may be shorter. It is only written without numba.
        """
        return int(self._least_bits * num_tokens / 8)

    def _write_symbols(self, symbols: np.ndarray) -> bytes:
        if rans.compiled_rans() is None:
            method, stream = DEFLATE, zlib.compress(symbols.tobytes(), 6)
        else:
            method, stream = RANS, rans.encode(symbols, self._classes, self._tables)
        return bytes([method]) + count_bytes(len(stream)) + stream

    def _read_symbols(self, reader: Reader, num_tokens: int) -> np.ndarray:
        method = int(reader.take("u1", 1)[0])
        size = len(self._classes) * num_tokens
        stream = reader.take("u1", reader.count(2 * size + 1024))
        if method == RANS:
            return rans.decode(stream, self._classes, num_tokens, self._tables)
        if method != DEFLATE:
            raise Corrupt(f"symbols coded by method {method}, which is none")
        symbols = np.frombuffer(_inflated(stream, size), np.uint8)
        symbols = symbols.reshape(len(self._classes), num_tokens)
        if np.any(symbols > self._escapes):
            raise Corrupt("a symbol is beyond its alphabet")
        return symbols


def _inflated(stream: np.ndarray, size: int) -> bytes:
    engine = zlib.decompressobj()
    try:
        out = engine.decompress(stream.tobytes(), size + 1)
    except zlib.error as error:
        raise Corrupt(f"deflated symbols: {error}") from error
    if len(out) != size or not engine.eof or engine.unused_data:
        raise Corrupt(f"{len(out)} deflated symbols where {size} are expected")
    return out
