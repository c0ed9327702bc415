"""The protocols of a pipeline's stages.

A stage that has to store values of a chunk (its mean, its gains, its codes) returns them as bytes
when packing, its *note*, and reads them from a ``Reader`` when unpacking. The payload is not
trusted: a stage reads as much as the shape requires, checks it, and raises ``Corrupt``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvstore.codecs.reader import Reader


class Transform(Protocol):
    """A reversible map of a stack onto one with as many tokens."""

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        """Returns the mapped stack and the note that ``backward`` needs.

        ``stack``: fp32 (units, tokens, width); it may be overwritten.
        """

    def read(self, reader: Reader, num_tokens: int) -> object:
        """Returns the note that ``forward`` left in the payload.

        Raises:
            Corrupt: the payload is too short, or ``forward`` writes no such note.
        """

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        """Undoes ``forward``.

        ``stack``: fp32, or int32 levels if the quantiser restores levels.
        """

    def note_nbytes(self, num_tokens: int) -> int:
        """Returns the length of the note of a chunk of ``num_tokens``."""


class WithoutNote:
    """The two methods of a ``Transform`` that has to store no values of a chunk."""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def note_nbytes(self, num_tokens: int) -> int:
        return 0


class Gain(Protocol):
    """Divides each token of a stack by its size: a gain for each unit, token and gain group."""

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns gains, and which of them cannot be represented.

        ``stack``: fp32 (units, tokens, width). Returns fp32 and bool, both (units, tokens, gain
        groups).
        """

    def write(self, gains: np.ndarray) -> bytes:
        """Returns gains as bytes; ``gains``: fp32 (units, tokens, gain groups)."""

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        """Returns the gains that were written, fp32 (units, num_tokens, gain groups).

        Raises:
            Corrupt: the payload is too short, or its gains are invalid.
        """

    @property
    def is_fitted(self) -> bool:
        """True if gains are to fit the quantised stack; only if a unit has one gain group."""

    def nbytes(self, num_tokens: int) -> int:
        """Returns the length of the output of ``write``, an estimate if it is entropy-coded."""


class Quantiser(Protocol):
    """Maps components to small integers and back. Stateless."""

    def quantise(self, components: np.ndarray) -> np.ndarray:
        """Returns integer codes (units, tokens, columns) for fp32 (units, tokens, components).

        Most quantisers have one column of codes for each component.
        """

    def restore(self, codes: np.ndarray) -> np.ndarray:
        """Returns values (units, tokens, components) for codes.

        Any codes that a coder can read give finite values. They are fp32, or int32 levels for a
        transform in whole numbers.
        """


class Coder(Protocol):
    """Packs integer codes to bytes and back, without loss."""

    def write(self, codes: np.ndarray) -> bytes:
        """Returns codes, integers (units, tokens, columns), as bytes."""

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        """Returns the codes of ``num_tokens``; never allocates more than the codes take.

        Raises:
            Corrupt: the payload is too short, or its codes are invalid.
        """

    def nbytes(self, num_tokens: int) -> int:
        """Returns the length of the output of ``write``, an estimate if it is entropy-coded."""

    def least_nbytes(self, num_tokens: int) -> int:
        """Returns a lower bound of the length of the output of ``write``."""
