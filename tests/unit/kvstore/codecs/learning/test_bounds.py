"""The bounds of theory, where they are known by hand, and codecs of ours against them."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from engines.calibration.measuring.trials import round_trip
from kvstore.codecs.learning.bounds import RateDistortionBound, gaussian_gap_db
from kvstore.codecs.learning.samples import Samples, element_means
from kvstore.codecs.presets import open_codec
from kvstore.codecs.stacks.stack_shape import Scope
from kvstore.shapes import KVLayer, KVLayout, KVPair, KVRun, Rope
from tests.unit.kvstore.codecs.learning.calibration import (
    model_layout,
    model_metrics,
    model_profile,
    model_run,
    ropes_of,
)


def gaussian(layout: KVLayout, num_tokens: int, deviations: np.ndarray, seed: int) -> list[KVPair]:
    random = np.random.default_rng(seed)
    run = layout.empty(num_tokens)
    for array in (x for pair in run for x in pair):
        array[:] = random.standard_normal(array.shape) * deviations
    return run


def yardstick_of(deviations: np.ndarray, scope: Scope) -> tuple[RateDistortionBound, KVRun]:
    dim = len(deviations)
    layout = KVLayout("float32", (KVLayer(1, dim, dim),))
    text = gaussian(layout, 4000, deviations, 1)
    samples = Samples(layout, (None,), [text])
    return RateDistortionBound(samples, scope, element_means(samples)), text


def test_a_white_source_halves_its_error_with_half_a_bit() -> None:
    stick, _ = yardstick_of(np.ones(8), Scope("side"))
    assert stick.bits(0.25) == pytest.approx(1, abs=0.01)
    assert stick.bits(1 / 64) == pytest.approx(3, abs=0.01)
    assert stick.bits(1.0) == pytest.approx(0, abs=0.01)


def test_water_does_not_reach_components_below_its_level() -> None:
    """Half of the components are a hundred times as large in power as the others."""
    stick, _ = yardstick_of(np.repeat([10.0, 1.0], 32), Scope("side"))
    # The level is a tenth of the large ones: 1/2 log2(10) bits for half of the components.
    error = (100 / 10 + 1) / 101
    assert stick.bits(error) == pytest.approx(np.log2(10) / 4, abs=0.03)


def test_the_curve_is_the_bound_and_ends_at_the_given_rate() -> None:
    stick, _ = yardstick_of(np.repeat([10.0, 1.0], 32), Scope("side"))
    points = list(stick.curve(4.0))
    assert len(points) > 20 and points[0][0] == pytest.approx(0, abs=0.1)
    assert 3.5 < points[-1][0] <= 4.0
    for bits, error in points[::10]:
        assert stick.bits(error) == pytest.approx(bits, abs=1e-3)


def test_errors_of_nothing_and_of_everything() -> None:
    stick, text = yardstick_of(np.arange(1, 9), Scope("side"))
    assert stick.error(text, text) == 0
    nothing = [(np.zeros_like(k), np.zeros_like(v)) for k, v in text]
    assert stick.error(text, nothing) == pytest.approx(1, abs=0.02)


def test_a_turn_of_keys_changes_no_error() -> None:
    layout = KVLayout("float32", (KVLayer(1, 8, 8),))
    text, other = (gaussian(layout, 500, np.ones(8), seed) for seed in (1, 2))
    rope = Rope((1.0, 0.1, 0.01, 0.001))
    found = []
    for ropes in ((None,), (rope,)):
        samples = Samples(layout, ropes, [text])
        stick = RateDistortionBound(samples, Scope("side"), np.zeros(16, np.float32))
        found.append(stick.error(text, other))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_white_noise_at_the_bound_has_no_gap() -> None:
    assert gaussian_gap_db(3, 1 / 64) == pytest.approx(0)
    # Eight Lloyd-Max levels leave 0.0345 of a Gaussian: 3.45 dB above the bound.
    assert gaussian_gap_db(3, 0.03455) == pytest.approx(3.45, abs=0.01)


@functools.cache
def samples() -> Samples:
    layout = model_layout()
    texts = [model_run(layout, 300, seed=seed) for seed in range(100, 104)]
    return Samples(layout, ropes_of(layout), texts, model_metrics(layout))


@pytest.mark.parametrize("name", ["balanced", "safe"])
def test_an_entropy_coded_preset_is_near_its_bound(name: str) -> None:
    """Packs a text that it was learned from, in one chunk; headers and gains count for a part of a
    bit on rows as narrow as these."""
    stick = RateDistortionBound(samples(), Scope("layer"), model_profile().learned[name]["means"])
    text = samples().texts[0]
    trip = round_trip(open_codec(name, model_profile()), text, model_layout(), 300)
    above = trip.bits_per_element - stick.bits(stick.error(text, trip.run))
    assert 0 < above < 1.2
