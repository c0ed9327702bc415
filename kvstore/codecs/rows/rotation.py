"""The rotation that makes three bits enough: random signs, then a Hadamard matrix.

Channels of real keys differ in size by orders of magnitude, and one scale per row serves them
badly. Multiplied by a Hadamard matrix, every channel gets a share of every other and all become
nearly normal with the same variance (QuaRot, arXiv 2404.00456; TurboQuant, arXiv 2504.19874).

A Hadamard matrix (entries +1 and -1, orthogonal rows) of order ``dim`` is the Kronecker product of
a small one by Paley (1933) of order ``base`` and Sylvester's of order ``power``, a power of two.
For head dimensions that are powers of two, ``base`` is 1 and the product is a fast butterfly; 80,
96, 112, 192 and 576 have base 20, 12, 28, 12 and 36. It is never normalised, so that only additions
occur: the result is longer than the input by the factor sqrt(dim).

The order of every addition is part of the definition: groups of ``power`` neighbouring elements go
through the butterflies of distance 1, 2, 4, ..., then the groups are combined by the small matrix,
summed from the first to the last. The inverse does the same steps in reverse order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.loops.compiled import compiled_stages

MIN_DIM, MAX_DIM = 16, 1024


@dataclass(frozen=True)
class Order:
    """The split of a dimension into a ``base`` and a ``power``.

    ``base`` is 1 or a multiple of four, ``power`` a power of two.
    """

    base: int
    power: int

    @property
    def dim(self) -> int:
        """The product of both."""
        return self.base * self.power


def order_of(dim: int) -> Order | None:
    """Return the split with the smallest base, or None if no such Hadamard matrix exists."""
    if not MIN_DIM <= dim <= MAX_DIM or dim % 8:
        return None
    largest = dim & -dim
    if largest == dim:
        return Order(1, dim)
    powers = (largest >> shift for shift in range(largest.bit_length()))
    orders = (Order(dim // power, power) for power in powers)
    return next((order for order in orders if _has_paley(order.base)), None)


def _has_paley(order: int) -> bool:
    return order % 4 == 0 and (_is_prime(order - 1) or _is_paley_two(order))


def _is_paley_two(order: int) -> bool:
    prime = order // 2 - 1
    return prime % 4 == 1 and _is_prime(prime)


def _is_prime(number: int) -> bool:
    return number > 2 and all(number % k for k in range(2, int(number**0.5) + 1))


@functools.cache
def base_matrix(order: int) -> np.ndarray:
    """Return Paley's Hadamard matrix, fp32 (order, order), its first column all ones."""
    if order == 1:
        return np.ones((1, 1), np.float32)
    matrix: np.ndarray = (
        _paley_one(order - 1) if _is_prime(order - 1) else _paley_two(order // 2 - 1)
    )
    matrix *= matrix[:, :1].copy()  # negating a row keeps it orthogonal to the others
    matrix.setflags(write=False)
    return matrix


def _paley_one(prime: int) -> np.ndarray:
    matrix = _bordered(prime, below=-1)
    matrix += np.eye(prime + 1, dtype=np.float32)
    return matrix


def _paley_two(prime: int) -> np.ndarray:
    core = _bordered(prime, below=1)
    ones = np.array([[1, 1], [1, -1]], np.float32)
    diagonal = np.array([[1, -1], [-1, -1]], np.float32)
    matrix = np.kron(core, ones)
    matrix += np.kron(np.eye(prime + 1, dtype=np.float32), diagonal)
    return matrix


def _bordered(prime: int, below: int) -> np.ndarray:
    """Return Jacobsthal's matrix (is row - column a square modulo the prime?) with a border."""
    squares = {k * k % prime for k in range(1, prime)}
    character = np.array([0] + [1 if k in squares else -1 for k in range(1, prime)])
    index = np.arange(prime)
    matrix = np.ones((prime + 1, prime + 1), np.float32)
    matrix[1:, 0] = below
    matrix[0, 0] = 0
    matrix[1:, 1:] = character[(index[:, None] - index) % prime]
    return matrix


@functools.cache
def sign_masks(dim: int) -> np.ndarray:
    """Return one random sign per channel as masks for the top bit of an fp32, uint32 (dim,).

    They are taken from SHAKE-256, so that every language and version gets the same ones.
    """
    stream = hashlib.shake_256(f"thermocline signs {dim}".encode()).digest(dim // 8)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8), bitorder="little")
    masks: np.ndarray = bits.astype(np.uint32) << 31
    masks.setflags(write=False)
    return masks


def flip_signs(rows: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Negate fp32 values (num_rows, dim) where a uint32 mask (dim,) has its top bit set."""
    flipped: np.ndarray = rows.view(np.uint32) ^ masks
    return flipped.view(np.float32)


def rotate(rows: np.ndarray) -> np.ndarray:
    """Return H x for every row x; fp32 (num_rows, dim), contiguous.

    Raises ``ValueError`` if no H of this order is known.
    """
    order = _required(rows.shape[1])
    z = _butterflies(rows, _distances(order.power))
    return _multiply_base(z, base_matrix(order.base), order.power)


def rotate_back(rows: np.ndarray) -> np.ndarray:
    """Return H^T z for every row z, fp32 (num_rows, dim): ``dim`` times ``rotate``'s input."""
    order = _required(rows.shape[1])
    z = _multiply_base(rows, base_matrix(order.base).T, order.power)
    return _butterflies(z, _distances(order.power)[::-1])


def squared_norms(rows: np.ndarray) -> np.ndarray:
    """Return the sum of squares of every row, fp32 (num_rows,).

    Neighbours are added first, then groups, then columns. ``rows``: fp32 (num_rows, dim). A square
    of a 16-bit float is exact in fp32, so a fused multiply-add would change nothing.
    """
    squares = rows * rows
    neighbours = squares[:, ::2] + squares[:, 1::2]
    num_places = max(_required(rows.shape[1]).power // 2, 1)
    return halving_sum(halving_sum(neighbours.reshape(len(rows), -1, num_places)))


def halving_sum(terms: np.ndarray) -> np.ndarray:
    """Sum over axis 1: add the upper half to the lower while even, then all from the first on.

    ``terms``: fp32 (num_rows, terms, ...).
    """
    while terms.shape[1] % 2 == 0:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    total = terms[:, 0]
    for k in range(1, terms.shape[1]):
        total = total + terms[:, k]
    return total


def inverse_root(dim: int) -> np.float32:
    """Return 1 / sqrt(dim), rounded once."""
    return np.float32(1 / np.sqrt(dim))


def _required(dim: int) -> Order:
    order = order_of(dim)
    if order is None:
        raise ValueError(f"no Hadamard matrix of order {dim} is known here")
    return order


def _distances(power: int) -> list[int]:
    return [1 << k for k in range(power.bit_length() - 1)]


def _butterflies(rows: np.ndarray, distances: Sequence[int]) -> np.ndarray:
    if fast := compiled_stages():
        rows = rows.copy()
        fast.butterflies(rows, np.array(distances, np.int64))
        return rows
    for distance in distances:
        pairs = rows.reshape(len(rows), -1, 2, distance)
        out = np.empty_like(pairs)
        np.add(pairs[:, :, 0], pairs[:, :, 1], out=out[:, :, 0])
        np.subtract(pairs[:, :, 0], pairs[:, :, 1], out=out[:, :, 1])
        rows = out.reshape(rows.shape)
    return rows


def _multiply_base(rows: np.ndarray, matrix: np.ndarray, power: int) -> np.ndarray:
    """Make each group a signed sum of all groups, added in order."""
    if len(matrix) == 1:
        return rows
    groups = rows.reshape(len(rows), len(matrix), power)
    total: np.ndarray = groups[:, :1] * matrix[None, :, :1]
    for k in range(1, len(matrix)):
        total = total + groups[:, k : k + 1] * matrix[None, :, k : k + 1]
    return total.reshape(rows.shape)
