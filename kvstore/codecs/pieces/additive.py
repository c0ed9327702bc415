"""Additive vector quantisation: each piece of a row as a sum of learned vectors (CommVQ).

The first stage takes the nearest of its vectors, the next the nearest to what is left. CommVQ
(arXiv 2506.18879) trains all stages together and makes them commute with RoPE, so that attention
can work on codes; a cold store restores whole keys, so un-RoPE before and RoPE behind do as well.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.pieces.vectors import NUM_VECTORS, UNIT, k_means, nearest


class AdditiveVectors:
    """Implements ``Quantiser``: for each piece of a row one code of a byte for each stage."""

    def __init__(self, vectors: np.ndarray) -> None:
        """``vectors``: (units, pieces, stages, 256, dim), of a row of pieces * dim columns."""
        self._vectors = vectors.astype(np.float32)

    def quantise(self, components: np.ndarray) -> np.ndarray:
        units, pieces, stages, _, dim = self._vectors.shape
        num_tokens = components.shape[1]
        left = np.array(components, np.float32).reshape(units, num_tokens, pieces, dim)
        codes = np.empty((units, num_tokens, pieces, stages), np.uint8)
        for unit, piece in np.ndindex(units, pieces):
            for stage in range(stages):
                vectors = self._vectors[unit, piece, stage]
                codes[unit, :, piece, stage] = nearest(left[unit, :, piece], vectors)
                left[unit, :, piece] -= vectors[codes[unit, :, piece, stage]]
        return codes.reshape(units, num_tokens, pieces * stages)

    def restore(self, codes: np.ndarray) -> np.ndarray:
        units, pieces, stages, _, dim = self._vectors.shape
        num_tokens = codes.shape[1]
        numbers = codes.reshape(units, num_tokens, pieces, stages)
        places = np.ix_(range(units), range(num_tokens), range(pieces), range(stages))
        vectors = self._vectors[places[0], places[2], places[3], numbers]
        rows: np.ndarray = vectors.sum(axis=3).reshape(units, num_tokens, pieces * dim)
        return rows


def learn_vectors(rows: np.ndarray, dim: int, num_stages: int, rounds: int) -> np.ndarray:
    """``rows``: (tokens, width) of one unit -> fp32 (pieces, stages, 256, dim)."""
    left = rows.reshape(len(rows), -1, dim) / UNIT
    stages = np.empty((left.shape[1], num_stages, NUM_VECTORS, dim))
    for piece, stage in np.ndindex(*stages.shape[:2]):
        samples = np.rint(left[:, piece])
        vectors = k_means(samples, NUM_VECTORS, rounds)
        left[:, piece] -= vectors[nearest(samples, vectors)]
        stages[piece, stage] = vectors
    learned: np.ndarray = (stages * UNIT).astype(np.float32)
    return learned
