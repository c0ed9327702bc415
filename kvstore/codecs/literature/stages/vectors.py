"""Vector quantisers: several neighbours at once become the nearest of 256 vectors.

The codebook of normal vectors needs no model. k-means (Lloyd) uses whole numbers, so that every
machine finds the same codebook.
"""

from __future__ import annotations

import functools

import numpy as np

from kvstore.codecs.literature.stages.draws import normal_draws

NUM_VECTORS = 256  # a byte each
SAMPLES_EACH = 32
ROUNDS = 20
UNIT = 2.0**-10  # of samples and vectors; sums of their products are exact in fp64
BLOCK_ROWS = 4096


class ProductVectors:
    """Takes one code for every ``dim`` neighbours. Implements ``Quantiser``."""

    def __init__(self, vectors: np.ndarray) -> None:
        """``vectors``: floats (at most 256, dim)."""
        self._vectors = np.ascontiguousarray(vectors, np.float32)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        units, num_tokens, _ = components.shape
        rows = np.ascontiguousarray(components).reshape(-1, self._vectors.shape[1])
        return nearest(rows, self._vectors).reshape(units, num_tokens, -1)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        units, num_tokens, _ = codes.shape
        known = np.minimum(codes, len(self._vectors) - 1)
        rows: np.ndarray = self._vectors[known]
        return rows.reshape(units, num_tokens, -1)


def nearest(rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Returns the index of the nearest vector for every row, uint8 (rows,); the first of equals.

    ``rows``: floats (rows, dim); ``vectors``: floats (vectors, dim).
    """
    lengths = (vectors * vectors).sum(axis=1) / 2
    codes = np.empty(len(rows), np.uint8)
    for start in range(0, len(rows), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        codes[block] = np.argmax(rows[block] @ vectors.T - lengths, axis=1)
    return codes


@functools.cache
def normal_vectors(dim: int) -> np.ndarray:
    """Returns the k-means codebook of normal vectors, fp32 (256, dim)."""
    samples = np.rint(normal_draws("codebook", NUM_VECTORS * SAMPLES_EACH, dim) / UNIT)
    return (k_means(samples, NUM_VECTORS) * UNIT).astype(np.float32)


def k_means(samples: np.ndarray, num_vectors: int, rounds: int = ROUNDS) -> np.ndarray:
    """Returns the means of clusters, whole numbers in fp64 (num_vectors, dim).

    Starts with the first samples as means.

    ``samples``: whole numbers in fp64 (samples, dim).
    """
    vectors = samples[np.arange(num_vectors) % len(samples)]
    for _ in range(rounds):
        codes = nearest(samples, vectors)
        counts = np.bincount(codes, minlength=num_vectors)
        sums = [np.bincount(codes, column, num_vectors) for column in samples.T]
        means = np.rint(np.stack(sums, axis=1) / np.maximum(counts, 1)[:, None])
        vectors = np.where(counts[:, None] > 0, means, vectors)
    return vectors
