"""What the kinds of pieces promise.

A piece that has to remember something of a chunk (its mean, its gains, its codes) returns it as
bytes when packing and takes it from a ``Reader`` when unpacking. The reader belongs to a payload
that nobody vouches for: a piece takes what the shape says, checks it, and raises ``Corrupt``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvstore.codecs.reader import Reader


class Transform(Protocol):
    """A reversible map of a stack onto one with as many tokens."""

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        """The mapped stack and what ``backward`` has to be told. ``stack`` may be overwritten."""

    def read(self, reader: Reader, num_tokens: int) -> object:
        """What ``forward`` left in the payload."""

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray: ...

    def note_nbytes(self, num_tokens: int) -> int: ...


class Gain(Protocol):
    """Takes the size of each token out of a stack; one gain for each unit, token and part."""

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """fp32 gains (units, tokens, parts), and which of them cannot be represented (bool)."""

    def write(self, gains: np.ndarray) -> bytes: ...

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray: ...

    @property
    def is_fitted(self) -> bool:
        """True if gains shall fit the quantised stack (one part per unit only)."""

    def nbytes(self, num_tokens: int) -> int:
        """Of ``write``; an estimate where it is entropy-coded."""


class Quantiser(Protocol):
    """Components to small integers and back. Stateless."""

    def quantise(self, components: np.ndarray) -> np.ndarray:
        """fp32 (units, tokens, width) -> integer codes of the same shape."""

    def restore(self, codes: np.ndarray) -> np.ndarray:
        """fp32; any codes that a coder may return give finite values."""


class Coder(Protocol):
    """Integer codes to bytes and back, without loss."""

    def write(self, codes: np.ndarray) -> bytes: ...

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        """Raises ``Corrupt``; never allocates more than the codes of ``num_tokens`` take."""

    def nbytes(self, num_tokens: int) -> int:
        """Of ``write``; an estimate where it is entropy-coded."""
