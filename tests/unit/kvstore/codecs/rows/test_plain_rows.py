"""The control: the scheme that the seed of this project described, and its claims."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.rows.row_format import PlainRows
from tests.unit.kvstore.codecs.samples import uneven


def described(row):
    """The seed's own words: L2 norm, times sqrt(D), nearest of eight centroids."""
    centroids = [-2.15195, -1.34391, -0.75601, -0.24509, 0.24509, 0.75601, 1.34391, 2.15195]
    norm = np.linalg.norm(row)
    scaled = row * np.sqrt(len(row)) / norm
    codes = np.abs(scaled[:, None] - centroids).argmin(axis=1)
    return np.array(centroids)[codes] * norm / np.sqrt(len(row))


def test_it_packs_as_described():
    rows, values = PlainRows(), uneven((300, 128))
    packed, norms = rows.pack(values)
    expected = np.array([described(row) for row in values])
    assert np.allclose(norms, np.linalg.norm(values, axis=1), rtol=1e-6)
    assert np.allclose(rows.unpack(packed, norms, 128), expected, rtol=1e-4)


def test_scales_are_recognised():
    rows = PlainRows()
    _, norms = rows.pack(np.r_[uneven((9, 64)), np.zeros((1, 64), np.float32)])
    assert norms[-1] == 0
    assert rows.are_scales(norms)
    for bad in (np.nan, np.inf, -1.0, 1e-40):
        assert not rows.are_scales(np.r_[norms, np.float32(bad)])
