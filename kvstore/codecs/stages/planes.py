"""Bit planes: any number of bits for each component, but the same length for every chunk.

A plane is one bit of one component for all tokens of the chunk, lowest token in the lowest bit,
padded to whole bytes. Planes of a component are contiguous, lowest bit first; components follow one
another, then units. So neighbours may have different numbers of bits.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.loops.compiled import compiled_stages
from kvstore.codecs.reader import Reader

# The bits of every byte as eight bytes, lowest first, in one word.
_SPREAD = np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").view("<u8")


class BitPlanes:
    """Packs codes of given numbers of bits as planes. Implements ``Coder``."""

    def __init__(self, bits: np.ndarray) -> None:
        """``bits``: integers (units, columns), 0 to 8.

        A code is at least 0 and less than ``2**bits``.
        """
        self._bits = bits.astype(np.int64)
        flat = self._bits.reshape(-1)
        self._components = np.repeat(np.arange(len(flat)), flat)
        firsts = np.cumsum(flat) - flat
        self._places = (np.arange(len(self._components)) - np.repeat(firsts, flat)).astype(np.uint8)

    def write(self, codes: np.ndarray) -> bytes:
        num_tokens = codes.shape[1]
        rows = np.zeros((self._bits.size, _padded(num_tokens)), np.uint8)
        units, components = self._bits.shape
        rows[:, :num_tokens].reshape(units, components, num_tokens)[:] = codes.swapaxes(1, 2)
        fast = compiled_stages()
        if fast is None:
            planes = (rows[self._components] >> self._places[:, None]) & 1
            return np.packbits(planes, axis=1, bitorder="little").tobytes()
        packed = np.empty((len(self._places), rows.shape[1] // 8), np.uint8)
        fast.pack_planes(rows.view("<u8"), self._bits.reshape(-1), packed)
        return packed.tobytes()

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        packed = reader.take("u1", len(self._places), _padded(num_tokens) // 8)
        rows = np.zeros((self._bits.size, _padded(num_tokens)), np.uint8)
        fast = compiled_stages()
        if fast is None:
            self._unpack(packed, rows)
        else:
            fast.unpack_planes(packed.copy(), self._bits.reshape(-1), _SPREAD, rows.view("<u8"))
        units, components = self._bits.shape
        return rows[:, :num_tokens].reshape(units, components, num_tokens).swapaxes(1, 2)

    def _unpack(self, packed: np.ndarray, rows: np.ndarray) -> None:
        planes = np.unpackbits(packed, axis=1, bitorder="little")
        for place in range(int(self._bits.max(initial=0))):
            chosen = self._places == place
            rows[self._components[chosen]] |= planes[chosen] << place

    def nbytes(self, num_tokens: int) -> int:
        return len(self._places) * _padded(num_tokens) // 8

    def least_nbytes(self, num_tokens: int) -> int:
        return self.nbytes(num_tokens)


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // 8) * 8
