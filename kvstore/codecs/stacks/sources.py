"""Rows that are attended to without being restored, at any stage of a codec.

A codec restores rows stage by stage, and most stages are linear: they rotate rows, scale them, or
add a mean. Such a stage can be applied once to the query of a product, or once to a weighted sum,
instead of to every row. A ``Source`` represents rows in this way. The innermost source holds the
codes; each stage wraps the source of the stage before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


class Source(Protocol):
    """Rows of some units (heads), all of one width."""

    def products(self, query: np.ndarray) -> np.ndarray:
        """Returns the product of every query with every row, fp32 (units, queries, tokens).

        ``query``: fp32 (units, queries, width).
        """

    def sums(self, weights: np.ndarray) -> np.ndarray:
        """Returns weighted sums of rows, fp32 (units, queries, width).

        ``weights``: fp32 (units, queries, tokens).
        """

    def rows(self) -> np.ndarray:
        """Returns the rows themselves, fp32 (units, tokens, width)."""


@runtime_checkable
class AttendedTransform(Protocol):
    """A transform of a pipeline that can be applied to queries and to sums."""

    def attended(self, source: Source, note: object) -> Source:
        """Returns the rows after this stage's ``backward``; ``source`` is the rows before it."""


@dataclass(frozen=True, eq=False)
class Components:
    """Rows as an array, fp32 (units, tokens, width). Implements ``Source``."""

    array: np.ndarray

    def products(self, query: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.matmul(query, self.array.swapaxes(1, 2))
        return found

    def sums(self, weights: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.matmul(weights, self.array)
        return found

    def rows(self) -> np.ndarray:
        return self.array


# Maps fp32 (units, queries or tokens, width) row by row.
Rowwise = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Mapped:
    """Rows after a linear map; its transpose is applied to queries. Implements ``Source``."""

    inner: Source
    forth: Rowwise
    transposed: Rowwise

    def products(self, query: np.ndarray) -> np.ndarray:
        return self.inner.products(self.transposed(query))

    def sums(self, weights: np.ndarray) -> np.ndarray:
        return self.forth(self.inner.sums(weights))

    def rows(self) -> np.ndarray:
        return self.forth(self.inner.rows())


@dataclass(frozen=True, eq=False)
class Scaled:
    """Rows, each times its factor; factors are fp32 (units, tokens). Implements ``Source``."""

    inner: Source
    factors: np.ndarray

    def products(self, query: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.inner.products(query) * self.factors[:, None]
        return found

    def sums(self, weights: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.inner.sums(weights * self.factors[:, None])
        return found

    def rows(self) -> np.ndarray:
        found: np.ndarray = self.inner.rows() * self.factors[:, :, None]
        return found


@dataclass(frozen=True, eq=False)
class Added:
    """Rows that are the sum of several sources' rows. Implements ``Source``."""

    parts: tuple[Source, ...]

    def products(self, query: np.ndarray) -> np.ndarray:
        total = self.parts[0].products(query)
        for part in self.parts[1:]:
            total = total + part.products(query)
        return total

    def sums(self, weights: np.ndarray) -> np.ndarray:
        total = self.parts[0].sums(weights)
        for part in self.parts[1:]:
            total = total + part.sums(weights)
        return total

    def rows(self) -> np.ndarray:
        total = self.parts[0].rows()
        for part in self.parts[1:]:
            total = total + part.rows()
        return total
