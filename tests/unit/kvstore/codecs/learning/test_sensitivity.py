"""Which errors matter, and how the codecs use that."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.codecs.base import NUM_SINKS
from kvstore.codecs.calibrated import calibrated_codec, learn_profile
from kvstore.codecs.floats import widen
from kvstore.codecs.learning.samples import Samples, element_means
from kvstore.codecs.learning.sensitivity import Sensitivities
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.model_transforms import HeadMetric
from tests.unit.kvstore.codecs.learning.calibration import (
    model_layout,
    model_metrics,
    model_run,
    ropes_of,
    turned,
)

LAYOUT = model_layout()
TEXTS = [model_run(LAYOUT, 200, seed=seed) for seed in range(3)]
SEEN = 120  # tokens that gradients reach back to


def samples(metrics=None, texts=TEXTS):
    return Samples(LAYOUT, ropes_of(LAYOUT), texts, metrics)


@pytest.mark.parametrize("scope", [Scope("head"), Scope("layer"), Scope("group", 3)])
def test_a_metric_weighs_errors_and_comes_back(scope):
    metrics = model_metrics(LAYOUT)
    for shape in stack_shapes(scope, LAYOUT):
        metric = HeadMetric(shape, samples(metrics).roots(shape))
        stack = np.random.default_rng(1).standard_normal((shape.num_units, 5, shape.width))
        stack = stack.astype(np.float32)
        weighed, note = metric.forward(stack.copy(), 0)
        assert note == b""
        assert np.allclose(metric.backward(weighed, 0, None), stack, atol=1e-4)


def test_the_square_of_a_root_is_the_metric_and_its_ridge():
    metrics = model_metrics(LAYOUT)
    (shape,) = stack_shapes(Scope("head"), LAYOUT)
    roots = samples(metrics).roots(shape).reshape(-1, 16, 16)
    mean = np.mean([np.trace(x) / 16 for x in metrics])
    expected = np.stack([x / mean for x in metrics])
    expected += np.stack([np.eye(16) * np.trace(x) / 16 for x in expected]) * 1.0
    assert np.allclose(roots @ roots, expected, rtol=1e-3, atol=1e-3)


def test_gradients_become_metrics_of_relative_errors():
    """A loss that sees one channel of one head of V, and one of K before it is turned."""
    sums = Sensitivities(LAYOUT, ropes_of(LAYOUT))
    assert sums.metrics() is None
    for text in TEXTS:
        for layer, (rows, (by_keys, by_values)) in enumerate(
            zip(text, _gradient(text), strict=True)
        ):
            twice = np.stack([by_keys, by_keys]), np.stack([by_values, by_values])
            sums.add(layer, rows, twice)
    found = sums.metrics()
    assert found is not None
    assert [number for number, metric in enumerate(found) if metric.any()] == [7, 8]
    value, key = found[7], found[8]
    assert np.count_nonzero(value) == 1
    assert key[5, 5] == pytest.approx(np.abs(key).sum(), rel=0.02)
    assert value[3, 3] == pytest.approx(4 * _mean_size(layer=1, side=1), rel=0.01)
    assert key[5, 5] == pytest.approx(_mean_size(layer=2, side=0), rel=0.02)


def _gradient(text):
    layout = model_layout("float32")
    gradient = [(np.zeros(k.shape, np.float32), np.zeros(v.shape, np.float32)) for k, v in text]
    gradient[1][1][1, :, 3] = 2
    gradient[2][0][0, :, 5] = 1
    return [(k[:, :SEEN], v[:, :SEEN]) for k, v in turned(gradient, layout, 0)]


def _mean_size(layer, side):
    """Square of the gain that errors are relative to."""
    shape = next(x for x in stack_shapes(Scope("side"), LAYOUT))
    squares = []
    number = 2 * layer + side
    for text in TEXTS:
        means = element_means(samples(texts=[text]))
        rows = samples().stack(shape, text)[number, : SEEN - NUM_SINKS]
        squares.append(np.square(rows - means[shape.elements[number]]).mean())
    return np.mean(squares)


def test_errors_go_where_they_matter_least():
    """One of two heads of one distribution is looked at by later tokens: it comes back closer."""
    blind = [np.eye(16, dtype=np.float32) * (9 if n % 2 else 1) for n in range(12)]
    profile = learn_profile(samples(blind), "no model", ["max"])
    codec = calibrated_codec("max", profile)
    run = model_run(LAYOUT, 128, seed=9)
    out = LAYOUT.empty(128)
    codec.decode(memoryview(codec.encode(run, LAYOUT, 0)), LAYOUT, 0, out)
    errors, energies = np.zeros((2, 2))
    for before, after in zip(run, out, strict=True):
        for x, y in zip(before, after, strict=True):
            exact, packed = (widen(array, "bfloat16")[:, NUM_SINKS:] for array in (x, y))
            errors += np.square(exact - packed).sum(axis=(1, 2))
            energies += np.square(exact).sum(axis=(1, 2))
    unseen, seen = errors / energies
    assert seen < unseen / 2
