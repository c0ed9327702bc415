"""Reads a payload from front to back, and never beyond its end."""

from __future__ import annotations

import math

import numpy as np

from kvstore.errors import Corrupt


class Reader:
    """A position in one payload; used by one thread."""

    def __init__(self, payload: memoryview) -> None:
        self._bytes: np.ndarray = np.frombuffer(payload, np.uint8)
        self._at = 0

    def take(self, dtype: str, *shape: int) -> np.ndarray:
        """Return the next array of that dtype and shape, a read-only view.

        ``dtype`` states the byte order.

        Raises:
            Corrupt: the payload is too short.
        """
        kind = np.dtype(dtype)
        end = self._at + math.prod(shape) * kind.itemsize
        if end > len(self._bytes):
            raise Corrupt(f"payload of {len(self._bytes)} bytes, at least {end} expected")
        view = self._bytes[self._at : end]
        self._at = end
        return view.view(kind).reshape(shape)

    def count(self, most: int) -> int:
        """Return the next number, a u32: the count of the entries that follow.

        Raises:
            Corrupt: it is larger than ``most``.
        """
        number = int(self.take("<u4", 1)[0])
        if number > most:
            raise Corrupt(f"{number} entries where at most {most} are possible")
        return number

    def expect_end(self) -> None:
        """Check that nothing is left. Raises ``Corrupt`` if something is."""
        if self._at != len(self._bytes):
            raise Corrupt(f"payload of {len(self._bytes)} bytes, {self._at} expected")


def count_bytes(number: int) -> bytes:
    """Return the bytes from which ``Reader.count`` reads this number."""
    return number.to_bytes(4, "little")
