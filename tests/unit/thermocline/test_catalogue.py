"""Levels: the known ones of a normal variable, and the exact ones of a rotated row."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline import codebook


def test_levels_of_a_normal_variable_are_max_and_lloyds():
    assert codebook(1) == pytest.approx([-0.7979, 0.7979], abs=1e-4)
    assert codebook(2) == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=1e-3)
    assert codebook(3)[-4:] == pytest.approx([0.2451, 0.7560, 1.344, 2.152], abs=1e-3)
    assert codebook(3) is codebook(3) and not codebook(3).flags.writeable


@pytest.mark.parametrize("dim", [4, 64])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_levels_of_the_sphere_are_the_means_of_their_cells(bits, dim):
    levels = codebook(bits, dim).astype(np.float64)
    assert (np.diff(levels) > 0).all() and np.allclose(levels, -levels[::-1])
    angles = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
    grid, density = np.sin(angles) * np.sqrt(dim), np.cos(angles) ** (dim - 2)
    cells = np.searchsorted((levels[1:] + levels[:-1]) / 2, grid)
    means = np.bincount(cells, grid * density) / np.bincount(cells, density)
    assert np.allclose(means, levels, atol=1e-4)


def test_rotated_rows_follow_the_law():
    """One draw of directions: the exact levels beat the normal ones, by little."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((10_000, 8))
    rows *= np.sqrt(8) / np.linalg.norm(rows, axis=1, keepdims=True)

    def error(levels):
        bounds = (levels[1:] + levels[:-1]) / 2
        return np.mean((rows - levels[np.searchsorted(bounds, rows)]) ** 2)

    assert error(codebook(3, 8)) < error(codebook(3)) < 1.2 * error(codebook(3, 8))


def test_many_dimensions_tend_to_the_normal_levels():
    assert np.allclose(codebook(4, 4_000), codebook(4), atol=2e-3)


@pytest.mark.parametrize(("bits", "dim"), [(0, None), (9, None), (3, 3)])
def test_impossible_codebooks_are_refused(bits, dim):
    with pytest.raises(ValueError, match="possible|4 or more"):
        codebook(bits, dim)
