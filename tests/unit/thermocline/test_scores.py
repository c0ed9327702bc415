"""Products with packed rows, and weighted sums of them, against those of restored rows."""

from __future__ import annotations

import numpy as np
import pytest

import thermocline
from kvstore.codecs.literature.stages.levels import normal_levels
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from tests.pairs import in_pairs
from tests.unit.kvstore.codecs.samples import uneven
from tests.unit.thermocline.methods import in_numpy
from thermocline import KVLayer, KVLayout

NAMES = ("tq1", "tq3", "tq4", "kivi", "manthan")
UNBIASED = (
    *("tqprod:bits=2", "tqprod", "tqprod:bits=4", "qjl", "qjl:signs=512"),
    *("rabitq", "rabitq:bits=2", "rabitq:bits=4", "rabitq:clusters=16"),
)
PAIRS, DIM = 10_000, 64


@pytest.mark.parametrize(("name", "first_token", "dim"), in_pairs(NAMES, (0, 2, 50), (64, 100)))
def test_scores_and_sums_are_those_of_restored_rows(name, dim, first_token):
    method, rng = in_numpy(name), np.random.default_rng(3)
    if (name, dim) == ("tq3", 64):
        method = thermocline.codec(name)  # with kernels
    rows = uneven((2, 30, dim))
    if not name.startswith("rabitq"):  # its centroids would drown values in their rounding
        rows[1, 20], rows[0, 9, 1] = 0, 1e30  # rows that cannot be packed
    query = rng.standard_normal((2, 5, dim)).astype(np.float32)
    weights = rng.random((2, 5, 30)).astype(np.float32)
    weights[0, :, 9] = 0
    side = "value" if first_token == 2 else "key"
    packed = method.pack(rows, side, first_token=first_token)
    restored = method.restore(packed)
    right = np.einsum("hqd,htd->hqt", query, restored)
    # Restored rows are rounded to bf16, and products with packed ones are not.
    norms = np.linalg.norm(restored.astype(np.float64), axis=2)  # of 1e30 squared, too
    size = np.linalg.norm(query, axis=2)[..., None] * norms[:, None]
    assert (np.abs(method.scores(query, packed) - right) <= 1e-6 + size / 256).all()
    assert_sums_as_restored(method, packed, weights)


def assert_sums_as_restored(method, packed, weights):
    restored = method.restore(packed)
    right = np.einsum("hqt,htd->hqd", weights, restored)
    size = np.einsum("hqt,htd->hqd", weights, np.abs(restored))
    assert (np.abs(method.weighted_sum(weights, packed) - right) <= 1e-5 + size / 256).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_is_stored_unquantised_counts_once(name):
    method, rng = in_numpy(name), np.random.default_rng(4)
    rows = uneven((2, 30, 64))
    rows[0, 9] *= 1e5  # no gain reaches so far, and it has a part in the mean of its chunk
    packed = method.pack(rows, first_token=50)
    assert_sums_as_restored(method, packed, rng.random((2, 5, 30)).astype(np.float32))


def test_scores_of_wrong_shapes_and_of_other_methods_are_refused():
    method = thermocline.codec("tq4", backend="numpy")
    packed = method.pack(uneven((2, 8, 64)))
    with pytest.raises(ValueError, match=r"fp32 \(2, queries, 64\)"):
        method.scores(np.zeros((3, 1, 64), np.float32), packed)
    with pytest.raises(ValueError, match=r"fp32 \(2, queries, 8\)"):
        method.weighted_sum(np.zeros((2, 1, 9), np.float32), packed)
    with pytest.raises(thermocline.Mismatch, match=r"packed by tq4\.\d+, not by manthan\.1"):
        thermocline.codec("manthan").scores(np.zeros((2, 1, 64), np.float32), packed)


def pairs():
    """Keys and queries (100, 100, dim), and their true products, fp64 (100, 100)."""
    rng = np.random.default_rng(11)
    keys = rng.standard_normal((100, PAIRS // 100, DIM)).astype(np.float32)
    queries = keys / 2 + rng.standard_normal(keys.shape).astype(np.float32)
    return keys, queries, np.einsum("htd,htd->ht", queries, keys).astype(np.float64)


def slope(found, true):
    """The slope of results over true products, and its standard error."""
    energy = np.sum(true * true)
    mean = float(np.sum(found * true) / energy)
    return mean, float(np.std(found - mean * true) / np.sqrt(energy))


def slope_of(name):
    method = in_numpy(name)
    keys, queries, true = pairs()
    found = method.scores(queries, method.pack(keys, first_token=4))
    return slope(np.diagonal(found, axis1=1, axis2=2), true)


@pytest.mark.parametrize("name", UNBIASED)
def test_products_are_unbiased(name):
    mean, error = slope_of(name)
    assert abs(mean - 1) < 4 * error


def test_products_of_the_least_error_are_biased():
    mean, error = slope_of("rabitq:unbiased=0")
    assert mean < 1 - 20 * error
    (shape,) = stack_shapes(Scope("head"), KVLayout("float32", (KVLayer(1, DIM, 0),)))
    levels = normal_levels(shape, 2)  # one bit of levels, tqprod's without the sketch
    keys, queries, true = pairs()
    flat = keys.reshape(1, -1, DIM)
    coarse = levels.restore(levels.quantise(flat)).reshape(keys.shape)
    mean, error = slope(np.einsum("htd,htd->ht", queries, coarse), true)
    assert mean < 1 - 20 * error
