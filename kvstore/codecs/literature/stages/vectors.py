"""Drawn vectors, the same on every machine: directions of sketches, and codebooks of quantisers.

QJL (arXiv 2406.03482): a sketch of ``k`` is sign(S k) with S normal. The mean of sqrt(pi / 2) / m
|k| S^T sign(S k) over S is ``k``, so products with a query are unbiased; single ones are far off.

A vector quantiser maps several neighbours at once to the nearest of 256 vectors. The codebook of
normal vectors needs no model. k-means (Lloyd) uses whole numbers, so that every machine finds the
same codebook.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from kvstore.codecs.loops.compiled import compiled_stages
from kvstore.errors import UnknownCodec

# Draws are rounded to its multiples, which hides differences of libm's last bits; sums of products
# of samples and vectors, in multiples of it, are exact in fp64.
UNIT = 2.0**-10
NUM_VECTORS = 256  # a byte each
SAMPLES_EACH = 32
ROUNDS = 20
BLOCK_ROWS = 4096
MOST_SKETCHED = 768  # values in a row: their square is drawn in 24 MiB and 30 ms, also for a claim


@functools.lru_cache(maxsize=4)  # up to 5 MiB each
def normal_draws(name: str, rows: int, columns: int) -> np.ndarray:
    """Return fp64 (rows, columns), read-only: SHAKE-256 of a name, then Box and Muller (1958)."""
    pairs = -(-rows * columns // 2)
    stream = hashlib.shake_256(f"thermocline {name} {rows} {columns}".encode()).digest(8 * pairs)
    sizes, turns = (np.frombuffer(stream, "<u4").reshape(2, pairs) + 0.5) / 2.0**32
    radii = np.sqrt(-2 * np.log(sizes))
    angles = 2 * np.pi * turns
    both = np.concatenate([radii * np.cos(angles), radii * np.sin(angles)])
    draws: np.ndarray = np.rint(both[: rows * columns] / UNIT) * UNIT
    draws = draws.reshape(rows, columns)
    draws.setflags(write=False)
    return draws


def directions(width: int, num_signs: int) -> np.ndarray:
    """Return S, fp32 (num_signs, width). Raises ``UnknownCodec`` if rows are too wide."""
    if width > MOST_SKETCHED:
        raise UnknownCodec(f"vectors of {width} values are not sketched; use codec raw")
    return normal_draws("sketch", num_signs, width).astype(np.float32)


def sign_size(width: int, num_signs: int) -> np.float32:
    """Return the length of one sign along its direction, for a row of root mean square one."""
    return np.float32(np.sqrt(np.pi / 2 * width) / num_signs)


class ProductVectors:
    """Takes one code for every ``dim`` neighbours. Implements ``Quantiser``."""

    def __init__(self, vectors: np.ndarray) -> None:
        """``vectors``: floats (at most 256, dim)."""
        self._vectors = np.ascontiguousarray(vectors, np.float32)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        units, num_tokens, _ = components.shape
        rows = np.ascontiguousarray(components).reshape(1, -1, self._vectors.shape[1])
        return nearest_of_each(rows, self._vectors[None]).reshape(units, num_tokens, -1)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        units, num_tokens, _ = codes.shape
        known = np.minimum(codes, len(self._vectors) - 1)
        rows: np.ndarray = self._vectors[known]
        return rows.reshape(units, num_tokens, -1)


def nearest(rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the index of the nearest vector for every row, uint8 (rows,); the first of equals.

    ``rows``: floats (rows, dim); ``vectors``: floats (vectors, dim).
    """
    lengths = (vectors * vectors).sum(axis=1) / 2
    codes = np.empty(len(rows), np.uint8)
    for start in range(0, len(rows), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        codes[block] = np.argmax(rows[block] @ vectors.T - lengths, axis=1)
    return codes


def nearest_of_each(rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Do the same with a table of vectors for each of several sets of rows, in fp32.

    Sums have one order, so that all machines find the same. ``rows``: (tables, rows, dim);
    ``vectors``: (tables, vectors, dim). Returns uint8 (tables, rows).
    """
    halves = (vectors * vectors).sum(axis=2) / 2
    codes = np.empty(rows.shape[:2], np.uint8)
    if fast := compiled_stages():
        columns = np.ascontiguousarray(rows.swapaxes(1, 2))
        fast.nearest_vectors(columns, np.ascontiguousarray(vectors), halves, codes)
        return codes
    for table, start in np.ndindex(len(rows), -(-rows.shape[1] // BLOCK_ROWS)):
        block = slice(start * BLOCK_ROWS, (start + 1) * BLOCK_ROWS)
        products = np.zeros((), np.float32)
        for column, factors in zip(rows[table, block].T, vectors[table].T, strict=True):
            products = products + column[:, None] * factors
        codes[table, block] = np.argmax(products - halves[table], axis=1)
    return codes


@functools.cache
def normal_vectors(dim: int) -> np.ndarray:
    """Return the k-means codebook of normal vectors, fp32 (256, dim)."""
    samples = np.rint(normal_draws("codebook", NUM_VECTORS * SAMPLES_EACH, dim) / UNIT)
    return (k_means(samples, first_of(samples, NUM_VECTORS)) * UNIT).astype(np.float32)


def k_means(samples: np.ndarray, vectors: np.ndarray, rounds: int = ROUNDS) -> np.ndarray:
    """Return the means of clusters, whole numbers in fp64 (vectors, dim).

    ``samples``: whole numbers in fp64 (samples, dim). ``vectors``: the means to begin with.
    """
    for _ in range(rounds):
        codes = nearest(samples, vectors)
        is_member = (codes == np.arange(len(vectors))[:, None]).astype(np.float64)
        counts = is_member.sum(axis=1, keepdims=True)
        means = np.rint(is_member @ samples / np.maximum(counts, 1))
        before, vectors = vectors, np.where(counts > 0, means, vectors)
        if np.array_equal(before, vectors):
            break
    return vectors


def first_of(samples: np.ndarray, num_vectors: int) -> np.ndarray:
    """Return the first samples, repeated if there are too few."""
    return samples[np.arange(num_vectors) % len(samples)]
