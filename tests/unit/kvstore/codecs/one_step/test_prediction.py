"""Units are predicted from those before, and restoring never drifts from packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.floats import narrow
from kvstore.codecs.learning.samples import Samples, element_means
from kvstore.codecs.one_step.one_step import OneStep
from kvstore.codecs.one_step.prediction_design import (
    PredictionWindow,
    band_of,
    expectations,
    predictors_of,
)
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader
from kvstore.codecs.stacks.stack_shape import Scope
from kvstore.codecs.stages.uniform import LARGEST_LEVEL, PredictedStep, Predictors, UniformStep
from kvstore.shapes import KVLayer, KVLayout
from tests.unit.kvstore.codecs.learning.calibration import ropes_of, turned

STEP = 0.25


def levels_of(units, components, per_step=12):
    levels = np.zeros((units, components, 4), np.int16)
    levels[:, :, 0] = per_step
    return levels


def chain(num_units=5, width=8, back=1, tokens=4000, noise=0.1):
    """Rows (units, tokens, width): each unit is a map of the one ``back`` units before."""
    rng = np.random.default_rng(0)
    units = [rng.standard_normal((tokens, width)) for _ in range(back)]
    for _ in range(num_units - back):
        turn = np.linalg.qr(rng.standard_normal((width, width)))[0]
        units.append(units[-back] @ turn + noise * rng.standard_normal((tokens, width)))
    return np.stack(units).astype(np.float32)


@pytest.mark.parametrize(("back", "depth"), [(1, 1), (1, 3), (2, 2), (3, 4)])
def test_the_prediction_from_units_before_is_found(back, depth):
    rows, window = chain(back=back), PredictionWindow(8, depth)
    found = expectations(band_of(iter([rows[:, :2500], rows[:, 2500:]]), window), window, 1e-3)
    for unit, known in enumerate(found):
        predicted = unit >= back
        assert np.allclose(known.left, 0.11, atol=0.02) if predicted else (known.left > 0.9).all()
        assert len(known.weights) == min(unit, depth) * 8
        assert np.allclose(known.turn.T @ known.turn, np.eye(8), atol=1e-6)
        assert not unit or (np.diff(known.deviations) <= 1e-9).all()


def test_a_unit_too_far_before_predicts_nothing():
    rows, window = chain(back=2), PredictionWindow(8, 1)
    found = expectations(band_of(iter([rows]), window), window, 1e-3)
    assert all((known.left > 0.9).all() for known in found)


def test_noise_of_a_coarse_step_counts():
    window = PredictionWindow(8, 1)
    fine, coarse = (
        expectations(band_of(iter([chain()]), window), window, step)[1].left.mean()
        for step in (1e-3, 1.5)
    )
    assert fine < 0.2 < coarse


def test_integers_expect_the_same_as_the_regression():
    rows, window = chain(back=2), PredictionWindow(8, 2)
    found = expectations(band_of(iter([rows]), window), window, 1e-3)
    levels = levels_of(5, 8)
    levels[:, :, 0] = 4 + np.arange(40).reshape(5, 8) % 29
    predictors = predictors_of([known.weights for known in found], levels[:, :, 0], window)
    turned = np.stack([x @ known.turn for x, known in zip(rows, found, strict=True)])
    quantiser = PredictedStep(UniformStep(STEP / 8, levels), predictors, np.ones((5, 8), bool))
    codes = quantiser.quantise(turned.astype(np.float32))
    sizes = [np.abs(x).mean() for x in codes]
    assert max(sizes[2:]) < min(sizes[:2]) / 5
    restored = quantiser.restore(codes) / levels[:, None, :, 0] * STEP / 8
    # Half a step, and the error of rounding to whole levels.
    assert np.abs(restored - turned).max() <= STEP / 8 * (0.5 + 1 / 4 + 1e-3)


@given(data=st.data())
def test_packing_and_restoring_never_drift_apart(data):
    """For all factors, and with components without codes: no unit hands an error on."""
    units, components, depth = 4, 6, data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    largest = data.draw(st.sampled_from([1, 40, 32767]))
    factors = rng.integers(-largest, largest + 1, (units, components, depth * components))
    finer = rng.integers(0, 15, (units, components))
    for unit in range(depth):
        factors[unit, :, : (depth - unit) * components] = 0
    predictors = Predictors(factors.astype(np.int16), finer.astype(np.int32))
    steps = UniformStep(STEP, levels_of(units, components + 3))
    coded = rng.random((units, components + 3)) < data.draw(st.sampled_from([0.5, 1.0]))
    quantiser = PredictedStep(steps, predictors, coded)
    exact = rng.standard_normal((units, 9, components + 3)).astype(np.float32) * 3
    codes = quantiser.quantise(exact)
    assert not codes.swapaxes(1, 2)[~coded].any()
    restored = quantiser.restore(codes)
    assert np.abs(restored).max() <= LARGEST_LEVEL
    missed = np.abs(restored / 12 * STEP - exact).max(axis=1)
    assert missed[coded].max(initial=0) <= STEP * 0.501


@pytest.mark.parametrize(
    ("factors", "finer"),
    [
        ((3, 4, 8), (3, 5)),
        ((3, 4, 6), (3, 4)),
        ((3, 5, 10), (3, 5)),  # pairs of components lie side by side
        ((3, 0, 4), (3, 0)),
    ],
)
def test_predictors_of_shapes_that_do_not_fit_are_refused(factors, finer):
    with pytest.raises(ValueError, match="factors"):
        Predictors(np.zeros(factors, np.int16), np.zeros(finer, np.int32))


@pytest.mark.parametrize("finer", [-1, 15, 40])
def test_sums_that_are_finer_than_they_can_be_are_refused(finer):
    with pytest.raises(ValueError, match="finer"):
        Predictors(np.zeros((1, 2, 2), np.int16), np.full((1, 2), finer, np.int32))


SIX_LAYERS = KVLayout("bfloat16", (KVLayer(2, 16, 16),) * 6)


def run_of_shared_causes(num_tokens, seed):
    """Many causes drive all layers, too many to describe a layer alone by few numbers."""
    model, text = np.random.default_rng(7), np.random.default_rng(seed)
    causes, run = text.standard_normal((num_tokens, 40)), SIX_LAYERS.empty(num_tokens)
    for array in (x for pair in run for x in pair):
        mixing = model.standard_normal((2, 40, 16)) / 6
        own = text.standard_normal((2, num_tokens, 16)) / 16
        array[:] = narrow((causes @ mixing + own).astype(np.float32), "bfloat16")
    return turned(run, SIX_LAYERS, 0)


def learned(bits, window, texts=None, layout=SIX_LAYERS, metrics=None):
    ropes = ropes_of(layout)
    texts = texts or [run_of_shared_causes(400, seed=seed) for seed in range(100, 108)]
    samples = Samples(layout, ropes, texts, metrics)
    means = element_means(samples)
    preset = OneStep(Scope("layer"), bits, window)
    known = {"means": means, **preset.learn(samples, means)}
    return preset.assemble(Profile("made up", layout, ropes, {"balanced": known}), known, layout)


def floats(array):
    return (array.astype(np.uint32) << 16).view(np.float32)


def cost_of(parts, run, layout):
    """Bytes, and the mean square error of values."""
    nbytes, out = 0, layout.empty(run[0][0].shape[1])
    for part in parts:
        payload = part.encode(run, 0, 0, layout.dtype)
        part.decode(Reader(memoryview(payload)), out, 0, 0, layout.dtype)
        nbytes += len(payload)
    pairs = zip((x for p in out for x in p), (x for p in run for x in p), strict=True)
    errors = [np.square(floats(a) - floats(b)).mean() for a, b in pairs]
    return nbytes, float(np.mean(errors))


def test_predicting_layers_from_each_other_saves_bytes():
    run = run_of_shared_causes(400, seed=5)
    alone, predicted = (learned(2.5, window) for window in (None, PredictionWindow(64, 2)))
    (alone_bytes, alone_error), (predicted_bytes, predicted_error) = (
        cost_of(parts, run, SIX_LAYERS) for parts in (alone, predicted)
    )
    assert predicted_error < 0.3 * alone_error
    assert predicted_bytes < 1.05 * alone_bytes


@pytest.mark.parametrize("value", [0.0, 3.0])
@pytest.mark.parametrize("layers", [(0,), (2, 3), (0, 1, 2, 3, 4, 5)])
def test_layers_that_are_the_same_for_all_tokens(layers, value):
    runs = [run_of_shared_causes(60, seed=seed) for seed in range(3)]
    for run in runs:
        for array in (x for layer in layers for x in run[layer]):
            array[:] = narrow(np.full(array.shape, value, np.float32), "bfloat16")
    parts = learned(1.5, PredictionWindow(64, 2), runs[1:])
    out = SIX_LAYERS.empty(60)
    for part in parts:
        part.decode(
            Reader(memoryview(part.encode(runs[0], 0, 0, "bfloat16"))), out, 0, 0, "bfloat16"
        )
    assert all(np.isfinite(floats(x)).all() for pair in out for x in pair)


def test_layers_of_another_width_that_do_not_matter():
    layout = KVLayout("bfloat16", (KVLayer(2, 16, 16),) * 2 + (KVLayer(2, 32, 32),) * 2)
    rng = np.random.default_rng(0)
    texts = [layout.empty(60) for _ in range(2)]
    for array in (x for text in texts for pair in text for x in pair):
        array[:] = narrow(rng.standard_normal(array.shape).astype(np.float32), "bfloat16")
    metrics = [np.eye(16, dtype=np.float32)] * 8 + [np.eye(32, dtype=np.float32) * 1e-9] * 8
    parts = learned(1.5, PredictionWindow(64, 2), texts, layout, metrics)
    assert all(part.encode(texts[0], 0, 0, "bfloat16") for part in parts)
