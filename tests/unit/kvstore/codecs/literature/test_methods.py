"""The claims of the literature's methods: which hold, and by how much the others fail.

*Alike* rows have channels of one size, as random data has; *uneven* ones differ, as real keys do.
"""

from __future__ import annotations

import functools
import hashlib
import itertools

import numpy as np
import pytest

from kvstore.codecs.floats import narrow, widen
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.literature.rate_quant import RateQuant
from kvstore.codecs.literature.spectral_quant import effective_dimensions
from kvstore.codecs.literature.stages.vectors import nearest, normal_vectors
from kvstore.codecs.names import LITERATURE
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.lloyd_max import gauss_error
from kvstore.shapes import KVLayer, KVLayout
from tests.unit.kvstore.codecs.learning.calibration import (
    model_layout,
    model_metrics,
    model_profile,
)
from tests.unit.kvstore.codecs.samples import cosine, layout_of, uneven

KEYS, VALUES = 0, 1
LAYOUT = layout_of(128, num_heads=4)
MODEL = model_layout()


def rows_of(kind):
    values = uneven((4, 128, 128))
    if kind == "alike":
        values = np.random.default_rng(0).standard_normal((4, 128, 128)).astype(np.float32)
    return widen(narrow(values, "bfloat16"), "bfloat16")


def through(name, rows):
    """K and V that come back of a codec that got ``rows`` as both."""
    stored = narrow(rows, "bfloat16")
    codec, out = codec_by_name(name), LAYOUT.empty(128)
    payload = codec.encode([(stored, stored)], LAYOUT, 128)
    codec.decode(memoryview(payload), LAYOUT, 128, out)
    return [widen(array, "bfloat16") for array in out[0]]


@functools.cache
def both(name, kind):
    return rows_of(kind), through(name, rows_of(kind))


def cosine_of(name, kind, side=KEYS):
    rows, restored = both(name, kind)
    return cosine(rows, restored[side])


def error_of(name, kind, side=KEYS):
    rows, restored = both(name, kind)
    return float(np.sum((rows - restored[side]) ** 2) / np.sum(rows**2))


def bits_of(name, dim=128):
    layout = layout_of(dim)
    return 8 * codec_by_name(name).packed_nbytes(layout, 128, 128) / 128 / layout.elements_per_token


SIZES = {  # bits for each element at D = 64, 128, 256, chunks of 128 tokens
    "manthan": (3.5, 3.25, 3.125),
    "tq1": (1.25, 1.125, 1.0625),
    "tq2": (2.25, 2.125, 2.0625),
    "tq8": (8.25, 8.125, 8.0625),
    "tqprod": (3.5, 3.25, 3.125),
    "base11": (3.75, 3.625, 3.531),
    "rvq": (2.25, 2.125, 2.0625),
    "rvq:bits=2": (4.25, 4.125, 4.0625),
    "rvq:bits=3": (6.25, 6.125, 6.0625),
    "vecinfer": (2.3125, 2.1875, 2.125),
    "polar": (3.875, 3.875, 3.875),
    "qjl": (2.125, 2.0625, 2.031),
    "rabitq": (2.8125, 2.6875, 2.625),
    "rabitq:bits=4": (4.3125, 4.1875, 4.125),
    "playground": (3.125, 3.0625, 3.031),
    "kivi": (3.0, 3.0, 3.0),
    "gear": (5.125, 4.75, 4.4375),
    "fp8": (8.0, 8.0, 8.0),
    "q8": (8.5, 8.5, 8.5),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_as_stated(name):
    assert [bits_of(name, dim) for dim in (64, 128, 256)] == pytest.approx(SIZES[name], abs=0.004)
    stored, codec = narrow(rows_of("uneven"), "bfloat16"), codec_by_name(name)
    payload = codec.encode([(stored, stored)], LAYOUT, 128)
    assert len(payload) == codec.packed_nbytes(LAYOUT, 128, 128)


COSINES = {  # alike rows: K, V; uneven rows: K, V
    "manthan": (0.983, 0.983, 0.934, 0.934),
    "tq2": (0.941, 0.941, 0.943, 0.943),
    "tqprod": (0.921, 0.921, 0.924, 0.924),
    "base11": (0.991, 0.991, 0.991, 0.991),
    "rvq": (0.937, 0.937, 0.940, 0.940),
    "vecinfer": (0.949, 0.949, 0.971, 0.949),
    "polar": (0.984, 0.984, 0.984, 0.984),
    "qjl": (0.624, 0.932, 0.624, 0.89),
    "rabitq": (0.802, 0.995, 0.806, 0.996),
    "playground": (0.983, 0.932, 0.984, 0.89),
    "kivi": (0.932, 0.932, 0.927, 0.89),
}


@pytest.mark.parametrize("name", COSINES)
def test_cosines_are_as_measured(name):
    got = [cosine_of(name, kind, side) for kind in ("alike", "uneven") for side in (KEYS, VALUES)]
    assert got == pytest.approx(COSINES[name], abs=0.012)


def test_manthan_is_the_codec_that_was_called_lm3():
    run = [(narrow(uneven((4, 9, 128)), "bfloat16"),) * 2]
    payloads = [codec_by_name(name).encode(run, LAYOUT, 128) for name in ("manthan", "lm3")]
    assert payloads[0] == payloads[1]


@pytest.mark.parametrize(
    "num_bits", [1, 3, 4, 8, *(pytest.param(x, marks=pytest.mark.thorough) for x in (2, 5, 6, 7))]
)
def test_turboquant_stays_within_2_72_of_the_bound(num_bits):
    """Its theorem: an error of sqrt(3) pi / 2 * 4 ** -bits at most, for any rows."""
    bound = 4.0**-num_bits
    rounding = 4e-6  # of the restored values to bf16
    limit = 3**0.5 * np.pi / 2 * bound
    assert bound < error_of(f"tq{num_bits}", "uneven") < limit + rounding


def slope(rows, restored, seed=4):
    """Returns the mean factor by which products with random queries come back."""
    queries = np.random.default_rng(seed).standard_normal((200, rows.shape[-1]))
    exact, got = (x.reshape(-1, x.shape[-1]) @ queries.T for x in (rows, restored))
    return float((exact * got).sum() / (exact * exact).sum())


@pytest.mark.parametrize("name", ["tqprod", "qjl"])
def test_sketches_give_unbiased_products(name):
    rows, restored = both(name, "uneven")
    assert slope(rows, restored[KEYS]) == pytest.approx(1, abs=0.05)


def test_more_bits_in_both_passes_lose_less_but_more_than_levels_of_as_many():
    for kind in ("alike", "uneven"):
        errors = [error_of(f"rvq:bits={bits}", kind) for bits in (1, 2, 3)]
        assert all(more < 0.25 * less for less, more in itertools.pairwise(errors))
        assert all(x > error_of(f"tq{2 * n}", kind) for n, x in enumerate(errors, 1))


def test_one_bit_in_both_passes_gives_the_bytes_of_earlier_releases():
    stored = narrow(uneven((4, 128, 128)), "bfloat16")
    for codec in map(codec_by_name, ("rvq", "rvq:bits=1")):
        payload = codec.encode([(stored, stored)], LAYOUT, 128)
        assert codec.id == "rvq.1"
        assert hashlib.blake2b(payload, digest_size=8).hexdigest() == "ab77fd112c51bc65"
    restored = narrow(both("rvq", "uneven")[1][KEYS], "bfloat16")
    assert hashlib.blake2b(restored.tobytes(), digest_size=8).hexdigest() == "d77fd46aa422f0ec"


def test_the_codebook_is_the_same_everywhere():
    vectors = normal_vectors(4)
    assert np.array_equal(vectors * 1024, np.rint(vectors * 1024))
    assert len(np.unique(vectors, axis=0)) == 256
    assert np.array_equal(nearest(vectors, vectors), np.arange(256))


def test_more_bits_and_more_clusters_lose_less():
    """The error of keys with ``bits`` comes near that of as many bits of levels."""
    errors = [error_of(f"rabitq:bits={bits},unbiased=0", "alike") for bits in range(1, 9)]
    assert all(more < 0.45 * less for less, more in itertools.pairwise(errors))
    for bits in (2, 4):
        assert errors[bits - 1] < 1.25 * gauss_error(1 << bits)
    rows, rng = rows_of("alike"), np.random.default_rng(5)
    crowded = rows + 10 * rng.standard_normal((4, 8, 128))[:, rng.integers(0, 8, 128)]
    crowded = widen(narrow(crowded.astype(np.float32), "bfloat16"), "bfloat16")
    lost = [np.sum((through(f"rabitq:clusters={n}", crowded)[0] - crowded) ** 2) for n in (1, 16)]
    assert lost[1] < lost[0] / 20


def test_bits_of_clusters_are_counted():
    stored, number = 15 * 16 / 128, 4 / 128  # of a key's value: 15 centroids more
    assert bits_of("rabitq:clusters=16") - bits_of("rabitq") == (stored + number) / 2


def test_spectral_bits_follow_the_effective_dimension():
    assert effective_dimensions(np.array([[1.0] * 8, [1.0] + [0.0] * 7])).tolist() == [8, 1]
    learned = model_profile("bfloat16").learned["spectral"]["bits.0"]
    assert set(np.unique(learned)) == {2, 5}


def test_ratequant_gives_bits_to_the_heads_that_matter():
    dealt = model_profile("bfloat16").learned["ratequant"]["bits.0"].astype(int)
    weights = [np.sqrt(np.trace(x) / len(x)) for x in model_metrics(MODEL)]
    assert dealt.sum() == 30 and dealt.min() >= 1
    assert np.corrcoef(weights, dealt)[0, 1] > 0.8


@pytest.mark.parametrize("by_layer", [0, 1])
@pytest.mark.parametrize("bits", [1, 2.25, 4, 8])
def test_ratequant_meets_any_target(bits, by_layer):
    method = RateQuant(bits=bits, by_layer=by_layer)
    rng = np.random.default_rng(7)
    run = [
        tuple(rng.standard_normal((2, 40, 32)).astype(np.float32) * 2**n for n in (0, k))
        for k in range(4)
    ]
    samples = Samples(KVLayout("float32", (KVLayer(2, 32, 32),) * 4), (None,) * 4, [run])
    dealt = method.learn(samples, np.zeros(0))["bits.0"].reshape(8, 2)
    assert dealt.mean() == bits
    if by_layer:
        assert np.array_equal(dealt[:, 0], dealt[:, 1])


def test_eight_bits_lose_next_to_nothing():
    for kind in ("alike", "uneven"):
        assert error_of("q8", kind) < 1e-4 < error_of("fp8", kind) < 1e-3


@pytest.mark.parametrize("kind", ["alike", "uneven"])
def test_gear_finds_errors_that_groups_missed(kind):
    names = ("gear:rank=0,outliers=0", "gear:rank=0", "gear:outliers=0", "gear", "gear:rank=16")
    plain, none, sparse, low_rank, both_parts, more = (error_of(x, kind) for x in ("kivi", *names))
    assert none == pytest.approx(plain, rel=1e-3)
    assert both_parts < min(sparse, low_rank) and max(sparse, low_rank) < plain
    assert more < both_parts


def test_every_method_has_its_figures():
    learned = {name for name, entry in LITERATURE.items() if entry.learn}
    assert learned == {"spectral", "ratequant", "kvquant", "commvq", "rabitq"}
    plain = {name for name in SIZES if ":" not in name}
    assert plain | {"tq5", "tq6", "tq7"} | learned == set(LITERATURE)
