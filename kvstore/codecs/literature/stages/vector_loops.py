"""Finds nearest vectors in a numba function, whose results equal numpy's: a loop of ``vectors``."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.codecs.loops.numba_functions import compiled

ROWS_AT_ONCE = 64


def _nearest_vectors(rows: Any, vectors: Any, halves: Any, codes: Any) -> None:
    """Finds the nearest vector of each row: the first with the largest product less half its size.

    ``rows``: fp32 (tables, dim, rows). ``vectors``: fp32 (tables, vectors, dim); ``halves``: half
    their squared lengths. ``codes``: uint8 (tables, rows). Products are summed from the first
    component to the last.
    """
    dim = rows.shape[1]
    block = np.zeros((dim, ROWS_AT_ONCE), np.float32)  # loops of a fixed length become vector code
    most = np.empty(ROWS_AT_ONCE, np.float32)
    found = np.empty(ROWS_AT_ONCE, np.float32)
    best = np.empty(ROWS_AT_ONCE, np.float32)
    for table in range(rows.shape[0]):
        for start in range(0, rows.shape[2], ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows.shape[2] - start)
            for at in range(dim):
                for row in range(count):
                    block[at, row] = rows[table, at, start + row]
            most[:] = -np.inf
            best[:] = 0
            for k in range(vectors.shape[1]):
                found[:] = 0
                for at in range(0, dim - 3, 4):
                    a, b = vectors[table, k, at], vectors[table, k, at + 1]
                    c, d = vectors[table, k, at + 2], vectors[table, k, at + 3]
                    for row in range(ROWS_AT_ONCE):
                        product = found[row] + block[at, row] * a
                        product += block[at + 1, row] * b
                        product += block[at + 2, row] * c
                        found[row] = product + block[at + 3, row] * d
                for at in range(dim // 4 * 4, dim):
                    a = vectors[table, k, at]
                    for row in range(ROWS_AT_ONCE):
                        found[row] += block[at, row] * a
                half = halves[table, k]
                number = np.float32(k)
                for row in range(ROWS_AT_ONCE):
                    product = found[row] - half
                    is_nearer = product > most[row]
                    most[row] = product if is_nearer else most[row]
                    best[row] = number if is_nearer else best[row]
            for row in range(count):
                codes[table, start + row] = np.uint8(best[row])


nearest_vectors = compiled("void", _nearest_vectors, "f4:3 f4:3 f4:2 u1:2")
