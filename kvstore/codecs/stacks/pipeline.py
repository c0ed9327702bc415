"""The stages of a preset in order, for one stack.

    position and centre -> gain -> transforms -> quantiser -> coder

A chunk of a stack in bytes: kept groups (their number, indices and 16-bit values), the note of each
transform, gains, codes. A gain group of a token that no gain can represent (infinite, undefined,
out of range) is *kept*: it is stored unquantised.

A stage that has to store values of a chunk (its mean, its gains, its codes) returns them as bytes
when packing, its *note*, and reads them from a ``Reader`` when unpacking. The payload is not
trusted: a stage reads as much as the shape requires, checks it, and raises ``Corrupt``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stacks.stack_shape import GainGroup, StackShape
from kvstore.errors import Corrupt
from kvstore.shapes import DType, KVRun, slice_tokens


class StackPacker(Protocol):
    """Packs one stack of a run: a pipeline, or a faster packer that agrees with it.

    Only tokens ``first ..`` of a run are packed; the first of them is token ``first_token`` of the
    session.
    """

    def nbytes(self, num_tokens: int) -> int:
        """Return the length of a chunk of ``num_tokens`` without kept groups, in bytes.

        It is an estimate if codes are entropy-coded.
        """

    def least_nbytes(self, num_tokens: int) -> int:
        """Return a lower bound of the length of any chunk of ``num_tokens``, in bytes."""

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        """Return this stack's part of a payload. ``run`` is read only."""

    def decode(
        self, readers: Sequence[Reader], out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        """Fill this stack's part of ``out`` from payloads of equally many tokens each.

        Several payloads can be read at once only if each has a multiple of ``rans.LANES`` tokens.

        Raises:
            Corrupt: a payload is not from a packer like this; ``out`` may then hold any values.
        """


class Transform(Protocol):
    """A reversible map of a stack onto one with as many tokens."""

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        """Return the mapped stack and the note that ``backward`` needs.

        ``stack``: fp32 (units, tokens, width); it may be overwritten.
        """

    def read(self, reader: Reader, num_tokens: int) -> object:
        """Return the note that ``forward`` left in the payload.

        Raises:
            Corrupt: the payload is too short, or ``forward`` writes no such note.
        """

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        """Undo ``forward``.

        ``stack``: fp32, or int32 levels if the quantiser restores levels.
        """

    def note_nbytes(self, num_tokens: int) -> int:
        """Return the length of the note of a chunk of ``num_tokens``."""


class WithoutNote:
    """The methods ``read`` and ``note_nbytes`` of a ``Transform`` whose notes are empty."""

    def read(self, reader: Reader, num_tokens: int) -> object:
        return None

    def note_nbytes(self, num_tokens: int) -> int:
        return 0


class Gain(Protocol):
    """Divides each token of a stack by its size: a gain for each unit, token and gain group."""

    def measure(self, stack: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return gains, and which of them cannot be represented.

        ``stack``: fp32 (units, tokens, width). Returns fp32 and bool, both (units, tokens, gain
        groups).
        """

    def write(self, gains: np.ndarray) -> bytes:
        """Return gains as bytes; ``gains``: fp32 (units, tokens, gain groups)."""

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        """Return the gains that were written, fp32 (units, num_tokens, gain groups).

        Raises:
            Corrupt: the payload is too short, or its gains are invalid.
        """

    @property
    def is_fitted(self) -> bool:
        """True if gains are fitted to the quantised stack; needs units of one gain group."""

    def nbytes(self, num_tokens: int) -> int:
        """Return the length of the output of ``write``, an estimate if it is entropy-coded."""


class Quantiser(Protocol):
    """Maps components to small integers and back. Stateless."""

    def quantise(self, components: np.ndarray) -> np.ndarray:
        """Return integer codes (units, tokens, columns) for fp32 (units, tokens, components).

        Most quantisers have one column of codes for each component.
        """

    def restore(self, codes: np.ndarray) -> np.ndarray:
        """Return values (units, tokens, components) for codes.

        Any codes that a coder can read give finite values. They are fp32, or int32 levels for a
        transform in whole numbers.
        """


class Coder(Protocol):
    """Packs integer codes to bytes and back, without loss."""

    def write(self, codes: np.ndarray) -> bytes:
        """Return codes, integers (units, tokens, columns), as bytes."""

    def read(self, reader: Reader, num_tokens: int) -> np.ndarray:
        """Return the codes of ``num_tokens``; never allocate more than the codes take.

        Raises:
            Corrupt: the payload is too short, or its codes are invalid.
        """

    def nbytes(self, num_tokens: int) -> int:
        """Return the length of the output of ``write``, an estimate if it is entropy-coded."""

    def least_nbytes(self, num_tokens: int) -> int:
        """Return a lower bound of the length of the output of ``write``."""


# Maps components and codes to factors of the gains, fp32 (units, tokens, 1).
FitGains: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Packs a stack stage by stage. Implements ``StackPacker``."""

    shape: StackShape
    before: tuple[Transform, ...]  # transforms before the gain: un-RoPE, means
    gain: Gain
    after: tuple[Transform, ...]  # transforms after the gain, on rows of unit size
    quantiser: Quantiser
    coder: Coder
    # Fits gains to codes; by default, by least squares of the restored rows.
    fit_gains: FitGains | None = None

    def nbytes(self, num_tokens: int) -> int:
        notes = sum(t.note_nbytes(num_tokens) for t in (*self.before, *self.after))
        return 4 + notes + self.gain.nbytes(num_tokens) + self.coder.nbytes(num_tokens)

    def least_nbytes(self, num_tokens: int) -> int:
        return self.coder.least_nbytes(num_tokens)

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        stack = self.shape.gather(run, first, dtype)
        packed, kept = self._pack(stack, first_token)
        return b"".join([self.kept_bytes(run, first, kept, dtype), *packed])

    def decode(
        self, readers: Sequence[Reader], out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        size = (out[0][0].shape[1] - first) // len(readers)
        for number, reader in enumerate(readers):
            begin = number * size
            rows = slice_tokens(out, first + begin, first + begin + size)
            kept, exact = self.read_kept(reader, size)
            stack = self._unpack(reader, size, first_token + begin)
            self.shape.scatter(stack, rows, 0, dtype)
            self.put_kept(rows, kept, exact, dtype)

    def _pack(self, stack: np.ndarray, first_token: int) -> tuple[list[bytes], np.ndarray]:
        """Return all but the kept groups, and a mask of those: bool (units, tokens, gain groups).

        ``stack``: fp32 (units, tokens, width) of 16-bit values; it is overwritten.
        """
        stack, notes, gains, kept = self.scaled(stack, first_token)
        for transform in self.after:
            stack, note = transform.forward(stack, first_token)
            notes.append(note)
        codes = self.quantiser.quantise(stack)
        if self.gain.is_fitted:
            gains *= (self.fit_gains or self._fit_gains)(stack, codes)
        return [*notes, self.gain.write(gains), self.coder.write(codes)], kept

    def scaled(
        self, stack: np.ndarray, first_token: int
    ) -> tuple[np.ndarray, list[bytes], np.ndarray, np.ndarray]:
        """Return rows of unit size, the notes so far, gains, and a mask of the kept groups."""
        notes = []
        with np.errstate(all="ignore"):
            for transform in self.before:
                stack, note = transform.forward(stack, first_token)
                notes.append(note)
        gains, kept = self.gain.measure(stack)
        gains[kept] = 1
        self._divide(stack, gains, kept)
        return stack, notes, gains, kept

    def _unpack(self, reader: Reader, num_tokens: int, first_token: int) -> np.ndarray:
        """Return fp32 (units, tokens, width), not yet rounded; kept groups have no meaning."""
        before = [transform.read(reader, num_tokens) for transform in self.before]
        after = [transform.read(reader, num_tokens) for transform in self.after]
        gains = self.gain.read(reader, num_tokens)
        stack = self.quantiser.restore(self.coder.read(reader, num_tokens))
        for transform, note in zip(self.after[::-1], after[::-1], strict=True):
            stack = transform.backward(stack, first_token, note)
        for number, part in enumerate(self.shape.gain_groups):
            stack[:, :, part.start : part.stop] *= gains[:, :, number, None]
        for transform, note in zip(self.before[::-1], before[::-1], strict=True):
            stack = transform.backward(stack, first_token, note)
        return stack

    def _divide(self, stack: np.ndarray, gains: np.ndarray, kept: np.ndarray) -> None:
        factors = 1 / np.where(gains > 0, gains, 1)
        for number, part in enumerate(self.shape.gain_groups):
            stack[:, :, part.start : part.stop] *= factors[:, :, number, None]
        for unit, token, number in zip(*np.nonzero(kept), strict=True):
            part = self.shape.gain_groups[number]
            stack[unit, token, part.start : part.stop] = 0

    def _fit_gains(self, components: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return _least_squares(components, self.quantiser.restore(codes))

    def kept_bytes(self, run: KVRun, first: int, kept: np.ndarray, dtype: DType) -> bytes:
        """Return the kept groups of ``run`` as bytes: their number, indices and values.

        Values come from the run itself, since a NaN that is converted may lose some of its bits.
        """
        numbers = np.flatnonzero(kept)
        bits = np.empty(int(self._widths(numbers).sum()), np.uint16)
        for unit, part, tokens, places in self._places(numbers, kept.shape[1]):
            for vector, columns in self.shape.vectors_in(unit, part):
                rows = run[vector.layer][vector.side][vector.head, first + tokens]
                bits[places[:, columns]] = floats.to_stored(rows, dtype)
        head = count_bytes(len(numbers)), numbers.astype("<u4").tobytes()
        return b"".join([*head, bits.astype("<u2").tobytes()])

    def read_kept(self, reader: Reader, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of kept groups, int64 (kept,), and the bits of all, in their order.

        The bits are uint16 (columns of all groups,).

        Raises:
            Corrupt: the payload is too short, or the numbers are not in order.
        """
        parts = self.shape.gain_groups
        most = self.shape.num_units * num_tokens * len(parts)
        numbers = reader.take("<u4", reader.count(most)).astype(np.int64)
        if len(numbers) and (numbers.max() >= most or np.any(np.diff(numbers) <= 0)):
            raise Corrupt("kept rows are out of order or beyond the end")
        return numbers, reader.take("<u2", int(self._widths(numbers).sum()))

    def put_kept(self, out: KVRun, numbers: np.ndarray, bits: np.ndarray, dtype: DType) -> None:
        """Write to ``out``, of one payload's tokens, the groups that ``read_kept`` returned.

        Bit for bit, including infinities.
        """
        for unit, part, tokens, places in self._places(numbers, out[0][0].shape[1]):
            for vector, columns in self.shape.vectors_in(unit, part):
                target = out[vector.layer][vector.side]
                target[vector.head, tokens] = floats.from_stored(bits[places[:, columns]], dtype)

    def _places(
        self, numbers: np.ndarray, num_tokens: int
    ) -> Iterator[tuple[int, GainGroup, np.ndarray, np.ndarray]]:
        """Yield each unit and gain group of which something is kept.

        With it come the tokens, int64 (kept,), and where their values lie among those of all kept
        groups, int64 (kept, columns).
        """
        ends, parts = np.cumsum(self._widths(numbers)), self.shape.gain_groups
        rows, part_numbers = np.divmod(numbers, len(parts))
        units, tokens = np.divmod(rows, max(num_tokens, 1))
        kinds = units * len(parts) + part_numbers
        for kind in np.unique(kinds).tolist():
            chosen, part = kinds == kind, parts[kind % len(parts)]
            width = part.stop - part.start
            places = (ends[chosen] - width)[:, None] + np.arange(width)
            yield kind // len(parts), part, tokens[chosen], places

    def _widths(self, numbers: np.ndarray) -> np.ndarray:
        """Return how many columns each kept group has."""
        widths = np.array([part.stop - part.start for part in self.shape.gain_groups], np.int64)
        return widths[numbers % len(widths)]


def _least_squares(exact: np.ndarray, quantised: np.ndarray) -> np.ndarray:
    """Return the factors that bring quantised rows closest, fp32 (units, tokens, 1)."""
    along = np.einsum("utw,utw->ut", exact, quantised)
    return gain_factors(along, np.einsum("utw,utw->ut", quantised, quantised))


def gain_factors(along: np.ndarray, energy: np.ndarray) -> np.ndarray:
    """Return along / energy within a factor of two, fp32 (units, tokens, 1); 1 if undefined."""
    usual = (along > 0) & (energy > 0)
    factors = np.where(usual, along / np.where(usual, energy, 1), 1)[:, :, None]
    return np.clip(factors, 0.5, 2).astype(np.float32)
