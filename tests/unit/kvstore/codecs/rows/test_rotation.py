from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvstore.codecs.rows import rotation
from tests.unit.kvstore.codecs.samples import uneven

DIMS = [16, 32, 64, 72, 80, 96, 104, 112, 120, 128, 160, 192, 256]


@pytest.mark.parametrize("dim", DIMS)
def test_it_is_a_hadamard_matrix_and_its_way_back(dim):
    eye = np.eye(dim, dtype=np.float32)
    matrix = rotation.rotate(eye)
    assert set(np.unique(matrix)) == {-1, 1}
    assert np.array_equal(matrix @ matrix.T, dim * eye)
    assert np.array_equal(rotation.rotate_back(matrix), dim * eye)


@pytest.mark.parametrize("dim", DIMS)
def test_norms(dim):
    rows = uneven((50, dim))
    assert np.allclose(rotation.squared_norms(rows), (rows.astype(np.float64) ** 2).sum(1))


@pytest.mark.parametrize("dim", [0, 8, 20, 63, 184, 2048])
def test_dimensions_without_a_matrix(dim):
    assert rotation.order_of(dim) is None
    with pytest.raises(ValueError, match=f"order {dim}"):
        rotation.rotate(np.ones((1, dim), np.float32))


def test_signs_are_frozen():
    signs = b"".join(rotation.sign_masks(dim).astype("<u4").tobytes() for dim in DIMS)
    assert hashlib.blake2b(signs, digest_size=8).hexdigest() == "3f42e80ac78e1721"
    assert all(4 < (rotation.sign_masks(dim) > 0).sum() < dim - 4 for dim in DIMS)
