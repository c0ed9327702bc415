"""Static symbol tables, learned in calibration and kept in the profile as integers.

To a very good approximation, the distribution of a component's codes depends on one number: its
deviation over the quantiser's step. So there is one table for each *class* of that ratio, an eighth
of an octave wide, and no component needs a table of its own.

A symbol stands for one code; a class has symbols for ``largest`` codes on either side of zero. The
last symbol is the escape for all other codes, which are stored elsewhere uncoded. The lowest bits
of the codes of a wide class are nearly uniform and are stored as bit planes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

CLASSES_PER_OCTAVE = 8
LOWEST_CLASS = -4 * CLASSES_PER_OCTAVE  # deviation of a sixteenth of a step
NUM_CLASSES = 16 * CLASSES_PER_OCTAVE
MAX_LARGEST = 62
NUM_SYMBOLS = 2 * MAX_LARGEST + 2
PRECISION = 12  # bits of a frequency
TOTAL = 1 << PRECISION
# The first class whose codes take 16-bit levels (see ``one_step.closed_loop``). In lower classes no
# symbol stands for a code above ``MOST_NARROW``, whose level a byte holds.
FIRST_WIDE = 47
MOST_NARROW = 15
CODED_BITS = 3  # that symbols carry of a ratio of 8 and more; lower bits go into planes
RARE = 2.0**-14
PRIOR_WEIGHT = 20.0


# The outputs of a decoder that writes the symbols themselves.
SYMBOLS = np.tile(np.arange(NUM_SYMBOLS, dtype=np.uint8), (NUM_CLASSES, 1))


def classes_of(ratios: np.ndarray) -> np.ndarray:
    """Return the int64 class numbers of deviations over steps, floats of any shape."""
    with np.errstate(divide="ignore"):
        octaves = np.log2(np.maximum(ratios, 1e-30))
    numbers = np.rint(CLASSES_PER_OCTAVE * octaves).astype(np.int64) - LOWEST_CLASS
    return np.clip(numbers, 0, NUM_CLASSES - 1)


def ratio_of(classes: np.ndarray) -> np.ndarray:
    """Return the deviation over step in the middle of each class, fp64 of the same shape."""
    return np.exp2((classes + LOWEST_CLASS) / CLASSES_PER_OCTAVE)


def plane_bits(classes: np.ndarray) -> np.ndarray:
    """Return the number of lowest bits of a code that go into planes, int64 for each class."""
    whole_octaves = (classes + LOWEST_CLASS) // CLASSES_PER_OCTAVE
    return np.maximum(whole_octaves - CODED_BITS, 0)


@dataclass(frozen=True, eq=False)
class SymbolTables:
    """One table of symbol frequencies for each class.

    ``frequencies``: uint16 (NUM_CLASSES, NUM_SYMBOLS); each row adds up to ``TOTAL``. ``largest``:
    uint8 (NUM_CLASSES,). Raises ``ValueError`` if they are inconsistent.
    """

    frequencies: np.ndarray
    largest: np.ndarray

    def __post_init__(self) -> None:
        shapes = (self.frequencies.shape, self.largest.shape)
        if shapes != ((NUM_CLASSES, NUM_SYMBOLS), (NUM_CLASSES,)):
            raise ValueError(f"symbol tables of shapes {shapes}")
        if self.frequencies.dtype != np.uint16 or self.largest.dtype != np.uint8:
            raise ValueError(f"symbol tables of {self.frequencies.dtype}, {self.largest.dtype}")
        beyond = np.arange(NUM_SYMBOLS) > self.escapes[:, None]
        if np.any(self.frequencies.astype(np.int64).sum(axis=1) != TOTAL):
            raise ValueError("frequencies of a class do not add up")
        most = np.where(np.arange(NUM_CLASSES) < FIRST_WIDE, MOST_NARROW, MAX_LARGEST)
        if np.any(self.largest > most) or np.any((self.frequencies > 0) == beyond):
            raise ValueError("a symbol has no frequency, or one beyond the alphabet has")

    @functools.cached_property
    def escapes(self) -> np.ndarray:
        """The last symbol of every class, int64 (NUM_CLASSES,)."""
        return 2 * self.largest.astype(np.int64) + 1

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The sum of the frequencies before each symbol, uint32 (NUM_CLASSES, NUM_SYMBOLS)."""
        counts = self.frequencies.astype(np.uint32)
        return np.cumsum(counts, axis=1, dtype=np.uint32) - counts

    @functools.cached_property
    def symbols(self) -> np.ndarray:
        """The symbol to which each slot of the total belongs, uint8 (NUM_CLASSES, TOTAL)."""
        numbers = np.arange(NUM_SYMBOLS, dtype=np.uint8)
        return np.stack([np.repeat(numbers, row) for row in self.frequencies.astype(np.int64)])

    @functools.cached_property
    def coding(self) -> np.ndarray:
        """The entries of an encoder, uint32 (NUM_CLASSES, NUM_SYMBOLS): start << 16 | frequency."""
        return self.starts << np.uint32(16) | self.frequencies

    def slots(self, outputs: np.ndarray = SYMBOLS) -> np.ndarray:
        """Return what a decoder looks up, uint32 (NUM_CLASSES, TOTAL).

        An entry is an output << 24 | the symbol's frequency << 12 | the slot less the symbol's
        start. ``outputs``: the byte that a decoder writes for each symbol, uint8 (NUM_CLASSES,
        NUM_SYMBOLS).
        """
        rows, symbols = np.arange(NUM_CLASSES)[:, None], self.symbols
        rest = np.arange(TOTAL, dtype=np.uint32) - self.starts[rows, symbols]
        frequencies = self.frequencies[rows, symbols].astype(np.uint32)
        entries: np.ndarray = outputs[rows, symbols].astype(np.uint32) << 24
        entries |= frequencies << PRECISION | rest
        return entries

    def bits(self) -> np.ndarray:
        """Return the mean bits of a code of each class, planes included, fp64 (NUM_CLASSES,)."""
        shares = self.frequencies / TOTAL
        lengths = -np.log2(np.where(shares > 0, shares, 1))
        return (shares * lengths).sum(axis=1) + plane_bits(np.arange(NUM_CLASSES))

    def least_bits(self) -> np.ndarray:
        """Return the bits of the most frequent symbol of each class, fp64 (NUM_CLASSES,)."""
        return -np.log2(self.frequencies.max(axis=1) / TOTAL)


def fit_tables(samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> SymbolTables:
    """Learn tables from codes and the classes of their rows.

    ``samples``: pairs of integer codes (rows, tokens) and int64 classes (rows,).
    """
    counts = np.zeros((NUM_CLASSES, NUM_SYMBOLS - 1))
    for codes, classes in samples:
        for number in np.unique(classes):
            high = codes[classes == number].astype(np.int64) >> plane_bits(number)
            values = np.clip(high, -MAX_LARGEST, MAX_LARGEST) + MAX_LARGEST
            counts[number] += np.bincount(values.reshape(-1), minlength=NUM_SYMBOLS - 1)
    shares = counts + PRIOR_WEIGHT * _prior()
    shares /= shares.sum(axis=1, keepdims=True)
    limits = (MOST_NARROW if number < FIRST_WIDE else MAX_LARGEST for number in range(NUM_CLASSES))
    rows = [_row(row, most) for row, most in zip(shares, limits, strict=True)]
    return SymbolTables(
        np.stack([frequencies for frequencies, _ in rows]),
        np.array([largest for _, largest in rows], np.uint8),
    )


def _prior() -> np.ndarray:
    """Return Laplace-shaped shares, for symbols that did not occur in calibration."""
    classes = np.arange(NUM_CLASSES)
    ratios = ratio_of(classes) / 2.0 ** plane_bits(classes)
    sizes = np.abs(np.arange(NUM_SYMBOLS - 1) - MAX_LARGEST)
    prior = np.exp(-sizes / (0.9 * ratios[:, None] + 0.05))
    prior /= prior.sum(axis=1, keepdims=True)
    return np.asarray(prior)


def _row(shares: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Return the integer frequencies of one class, and its ``largest``, at most ``most``."""
    sizes = np.abs(np.arange(len(shares)) - MAX_LARGEST)
    tails = [shares[sizes > largest].sum() for largest in range(most)]
    largest = next((k for k, tail in enumerate(tails) if tail < RARE), most)
    kept = shares[sizes <= largest]
    exact = np.append(kept, max(1 - kept.sum(), 0.0)) * TOTAL
    counts = np.maximum(np.rint(exact), 1)
    while counts.sum() != TOTAL:  # change the symbol whose cost changes least
        excess = int(np.sign(counts.sum() - TOTAL))
        costs = exact * np.abs(np.log2(np.maximum(counts - excess, 0.5) / counts))
        costs[counts <= excess] = np.inf
        counts[np.argmin(costs)] -= excess
    row = np.zeros(NUM_SYMBOLS, np.uint16)
    row[: len(counts)] = counts
    return row, largest
