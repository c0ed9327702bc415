"""The pieces of a preset in order, for one stack.

    position and centre -> gain -> transforms -> quantiser -> coder

A chunk of a stack in bytes: kept parts (how many, which, their 16-bit values), what each transform
notes, gains, codes. Parts that no gain can represent (infinite, undefined, out of range) are kept
as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.pieces.seams import Coder, Gain, Quantiser, Transform
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stacks import StackShape
from kvstore.errors import Corrupt
from kvstore.shapes import DType, KVRun


class StackPart(Protocol):
    """One stack of a run to bytes and back: a pipeline, or something quicker that agrees with it.

    ``first``: of the run's tokens, whose place in the session is ``first_token``.
    """

    def nbytes(self, num_tokens: int) -> int: ...

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes: ...

    def decode(
        self, reader: Reader, out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        """Raises ``Corrupt``; ``out`` may then hold anything."""


# Components and codes to factors of the gains.
Fit: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Implements ``StackPart``."""

    shape: StackShape
    before: tuple[Transform, ...]  # of the gain: un-RoPE, means
    gain: Gain
    after: tuple[Transform, ...]  # on rows of unit size
    quantiser: Quantiser
    coder: Coder
    fit: Fit | None = None  # of gains to codes; least squares of what is restored unless given

    def nbytes(self, num_tokens: int) -> int:
        """Of ``pack`` if no part is kept; an estimate where pieces are entropy-coded."""
        notes = sum(t.note_nbytes(num_tokens) for t in (*self.before, *self.after))
        return 4 + notes + self.gain.nbytes(num_tokens) + self.coder.nbytes(num_tokens)

    def encode(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes:
        return self.pack(self.shape.gather(run, first, dtype), first_token, dtype)

    def decode(
        self, reader: Reader, out: KVRun, first: int, first_token: int, dtype: DType
    ) -> None:
        num_tokens = out[0][0].shape[1] - first
        stack = self.unpack(reader, num_tokens, first_token, dtype)
        self.shape.scatter(stack, out, first, dtype)

    def pack(self, stack: np.ndarray, first_token: int, dtype: DType) -> bytes:
        """``stack``: fp32 (units, tokens, width) of 16-bit values; it is overwritten."""
        original, notes = stack.copy(), []
        with np.errstate(all="ignore"):
            for transform in self.before:
                stack, note = transform.forward(stack, first_token)
                notes.append(note)
        gains, kept = self.gain.measure(stack)
        gains[kept] = 1
        self._divide(stack, gains, kept)
        for transform in self.after:
            stack, note = transform.forward(stack, first_token)
            notes.append(note)
        codes = self.quantiser.quantise(stack)
        if self.gain.is_fitted:
            gains *= (self.fit or self._fit)(stack, codes)
        exact = self._kept_bytes(original, kept, dtype)
        return b"".join([exact, *notes, self.gain.write(gains), self.coder.write(codes)])

    def unpack(self, reader: Reader, num_tokens: int, first_token: int, dtype: DType) -> np.ndarray:
        """fp32 (units, tokens, width), not yet rounded, save for the kept parts."""
        kept, exact = self.read_kept(reader, num_tokens, dtype)
        before = [transform.read(reader, num_tokens) for transform in self.before]
        after = [transform.read(reader, num_tokens) for transform in self.after]
        gains = self.gain.read(reader, num_tokens)
        stack = self.quantiser.restore(self.coder.read(reader, num_tokens))
        for transform, note in zip(self.after[::-1], after[::-1], strict=True):
            stack = transform.backward(stack, first_token, note)
        for number, part in enumerate(self.shape.parts):
            stack[:, :, part.start : part.stop] *= gains[:, :, number, None]
        for transform, note in zip(self.before[::-1], before[::-1], strict=True):
            stack = transform.backward(stack, first_token, note)
        self._put_kept(stack, kept, exact, num_tokens)
        return stack

    def _divide(self, stack: np.ndarray, gains: np.ndarray, kept: np.ndarray) -> None:
        factors = 1 / np.where(gains > 0, gains, 1)
        for number, part in enumerate(self.shape.parts):
            stack[:, :, part.start : part.stop] *= factors[:, :, number, None]
        for unit, token, number in zip(*np.nonzero(kept), strict=True):
            part = self.shape.parts[number]
            stack[unit, token, part.start : part.stop] = 0

    def _fit(self, components: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return _fitting(components, self.quantiser.restore(codes))

    def _kept_bytes(self, original: np.ndarray, kept: np.ndarray, dtype: DType) -> bytes:
        numbers = np.flatnonzero(kept)
        places = self.places(numbers, kept.shape[1])
        stored = [_exact_bits(original[place], dtype).tobytes() for place in places]
        return b"".join([count_bytes(len(numbers)), numbers.astype("<u4").tobytes(), *stored])

    def read_kept(
        self, reader: Reader, num_tokens: int, dtype: DType
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        most = self.shape.num_units * num_tokens * len(self.shape.parts)
        numbers = reader.take("<u4", reader.count(most)).astype(np.int64)
        if len(numbers) and (numbers.max() >= most or np.any(np.diff(numbers) <= 0)):
            raise Corrupt("kept rows are out of order or beyond the end")
        values = [
            floats.widen(reader.take("<u2", columns.stop - columns.start), dtype)
            for _, _, columns in self.places(numbers, num_tokens)
        ]
        return numbers, values

    def _put_kept(
        self, stack: np.ndarray, numbers: np.ndarray, values: list[np.ndarray], num_tokens: int
    ) -> None:
        places = self.places(numbers, num_tokens)
        for (unit, token, columns), value in zip(places, values, strict=True):
            stack[unit, token, columns] = value

    def places(self, numbers: np.ndarray, num_tokens: int) -> list[tuple[int, int, slice]]:
        parts = self.shape.parts
        rows, part_numbers = np.divmod(numbers, len(parts))
        units, tokens = np.divmod(rows, max(num_tokens, 1))
        chosen = [parts[number] for number in part_numbers]
        columns = [slice(part.start, part.stop) for part in chosen]
        return list(zip(units.tolist(), tokens.tolist(), columns, strict=True))


def _fitting(exact: np.ndarray, quantised: np.ndarray) -> np.ndarray:
    """Factor by which a quantised row comes closest to the exact one, (units, tokens, 1)."""
    along = np.einsum("utw,utw->ut", exact, quantised)
    energy = np.einsum("utw,utw->ut", quantised, quantised)
    usual = (along > 0) & (energy > 0)
    factors = np.where(usual, along / np.where(usual, energy, 1), 1)[:, :, None]
    limited: np.ndarray = np.clip(factors, 0.5, 2)
    return limited


def _exact_bits(values: np.ndarray, dtype: DType) -> np.ndarray:
    """16-bit patterns of fp32 values that were widened from them."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
