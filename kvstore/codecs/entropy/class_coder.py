"""Entropy-codes integers of known deviation: rANS with static tables.

u32 length of the stream, the stream | bit planes of the wide classes | u32 number of escapes, i32
each
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.entropy import rans
from kvstore.codecs.entropy.tables import SYMBOLS, SymbolTables, plane_bits
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.errors import Corrupt

DEAD = 0  # the class of components that are always zero
LARGEST_CODE = 1 << 24
ROUNDING = 0.9  # factor in the lower bound of symbols' bits: rANS rounds its states to integers


@dataclass(frozen=True, eq=False)
class Coded:
    """The symbols of components that are not dead, as a payload stores them.

    ``symbols``: uint8 (rows, padded tokens), or other bytes that a decoder wrote instead. ``low``:
    the lowest bits of the rows that have planes, uint8 (rows with planes, tokens). ``rare``: the
    codes of escaped symbols, row by row, int32.
    """

    symbols: np.ndarray
    low: np.ndarray
    rare: np.ndarray


@dataclass(frozen=True, eq=False)
class Outputs:
    """The bytes that a decoder writes for symbols, and the table from which it takes them.

    ``of_symbols``: uint8 (NUM_CLASSES, NUM_SYMBOLS); the byte of an escape is that of no other
    symbol of its class.
    """

    of_symbols: np.ndarray
    slots: np.ndarray


class ClassCoder:
    """Codes components with the tables of their classes. Implements ``Coder``."""

    def __init__(self, classes: np.ndarray, tables: SymbolTables) -> None:
        """``classes``: integers (units, components)."""
        self._shape = classes.shape
        self._live = np.flatnonzero(classes.reshape(-1) != DEAD)
        self.classes = np.ascontiguousarray(classes.reshape(-1)[self._live], np.int64)
        self.tables = tables
        self._largest = tables.largest[self.classes].astype(np.int32)[:, None]
        self._escapes = tables.escapes[self.classes][:, None]
        low_bits = plane_bits(self.classes).astype(np.int32)
        self.with_planes = np.flatnonzero(low_bits)
        self._low_bits = low_bits[:, None]
        self._planes = BitPlanes(low_bits[None, self.with_planes])
        self._bits = float(tables.bits()[self.classes].sum())
        symbols = float(tables.least_bits()[self.classes].sum())
        self._least_bits = ROUNDING * symbols + float(low_bits.sum())

    def outputs(self, of_symbols: np.ndarray = SYMBOLS) -> Outputs:
        """Return the ``outputs`` argument of ``read_coded`` for bytes other than the symbols."""
        return Outputs(of_symbols, self.tables.slots(of_symbols))

    @functools.cached_property
    def _symbols(self) -> Outputs:
        return self.outputs()

    def write(self, codes: np.ndarray) -> bytes:
        rows = codes.swapaxes(1, 2).reshape(math.prod(self._shape), codes.shape[1])
        rows = rows[self._live].astype(np.int32)
        high = rows >> self._low_bits
        escaped = np.abs(high) > self._largest
        symbols = np.zeros((len(rows), rans.padded_tokens(rows.shape[1])), np.uint8)
        symbols[:, : rows.shape[1]] = np.where(escaped, self._escapes, high + self._largest)
        low = (rows & ((1 << self._low_bits) - 1))[self.with_planes].astype(np.uint8)
        return self.write_coded(Coded(symbols, low, high[escaped]), rows.shape[1])

    def write_coded(self, coded: Coded, num_tokens: int) -> bytes:
        """Return what ``write`` returns, for symbols instead of codes."""
        stream = rans.encode(coded.symbols, num_tokens, self.classes, self.tables)
        return b"".join(
            [
                count_bytes(len(stream)),
                stream,
                self._planes.write(coded.low.T[None]),
                count_bytes(len(coded.rare)),
                coded.rare.astype("<i4").tobytes(),
            ]
        )

    def read_coded(
        self, reader: Reader, num_tokens: int, outputs: Outputs
    ) -> tuple[Coded, np.ndarray]:
        """Return the symbols, from which ``read`` computes the codes, or other ``outputs``.

        Also the places of escaped symbols, int64: row times tokens plus token, ascending.

        Raises:
            Corrupt: the payload is too short, or its symbols are invalid.
        """
        most = 2 * len(self.classes) * num_tokens + rans.HEAD_BYTES
        stream = reader.take("u1", reader.count(most))
        symbols = rans.decode(stream, self.classes, num_tokens, outputs.slots)
        low = self._planes.read(reader, num_tokens)[0].T
        escapes = outputs.of_symbols[self.classes[:, None], self._escapes]
        places = np.flatnonzero(symbols[:, :num_tokens] == escapes)
        rare = reader.take("<i4", reader.count(len(symbols) * num_tokens))
        too_large = np.abs(rare.astype(np.int64)) > LARGEST_CODE
        if len(rare) != len(places) or np.any(too_large):
            raise Corrupt("escaped codes are too many, too few or too large")
        return Coded(symbols, low, rare.astype(np.int32)), places

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        coded, places = self.read_coded(reader, num_tokens, self._symbols)
        symbols = coded.symbols[:, :num_tokens]
        high = symbols.astype(np.int32) - self._largest
        high.reshape(-1)[places] = coded.rare
        high <<= self._low_bits
        high[self.with_planes] += coded.low
        units, components = self._shape
        codes = np.zeros((units * components, num_tokens), np.int32)
        codes[self._live] = high
        return codes.reshape(units, components, num_tokens).swapaxes(1, 2)

    def nbytes(self, num_tokens: int) -> int:
        """Return the length that is expected by the tables."""
        return int(self._bits * num_tokens / 8) + 4 + rans.HEAD_BYTES + 4

    def least_nbytes(self, num_tokens: int) -> int:
        """Return the length if every component had only its most frequent symbol, with planes."""
        return int(self._least_bits * num_tokens / 8)
