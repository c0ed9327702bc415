"""A profile that no learning can give is one to learn again, with kernels or without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.one_step.prediction_design import PredictionWindow
from kvstore.codecs.one_step.step_integers import ARRAYS
from kvstore.codecs.profile import Profile
from tests.unit.kvstore.codecs.damages import (
    SHAPES,
    assert_refused_or_restoring,
    changed,
    incomplete,
    is_refused,
)
from tests.unit.kvstore.codecs.fixed_rate.integer_models import layout_with, rope_of
from tests.unit.kvstore.codecs.one_step.step_models import profile_of

# As ``max`` has it: groups of ten layers. Kernels take the first, the pipeline the second.
WINDOW = PredictionWindow(34, 1)
FUSED = profile_of(layout_with(*[(16, 16)] * 20), None, window=WINDOW, layers=10)
APART = profile_of(layout_with(*[(24, 24)] * 20), rope_of(24), window=WINDOW, layers=10)
PROFILES = pytest.mark.parametrize("profile", [FUSED, APART], ids=["fused", "apart"])
VALUES: list[tuple[str, tuple[int, ...], Any]] = [
    *((name, (0,), x) for name in ("scales", "rates", "left") for x in (np.nan, np.inf, -1.0)),
    ("scales", (0,), 0.0),
    ("scales", (0,), 0.3),  # multiplying by it would round
    ("levels", (0, 0, 0), 0),
    ("levels", (0, 0, 0), -5),
    ("gain_classes", (0, 0), 255),
    ("counts", (0, 0), -1),
    ("counts", (0, 0), 9999),
    ("counts", (0, 1), 9999),
    ("counts", (0, 2), 16),
    ("counts", (0,), 0),  # components are coded
    ("finer", (0, 0), -1),
    ("finer", (0, 0), 15),
]


@PROFILES
def test_a_learned_profile_is_taken(profile: Profile):
    assert not is_refused(profile)


@PROFILES
@pytest.mark.parametrize("damage", SHAPES)
@pytest.mark.parametrize("name", [*ARRAYS, "means"])
def test_arrays_of_another_form_are_refused(profile: Profile, name: str, damage: str):
    key = name if name == "means" else f"{name}.0"
    assert is_refused(changed(profile, key, SHAPES[damage](profile.learned["max"][key])))


@PROFILES
@pytest.mark.parametrize("length", [33, 35, 67])
def test_factors_of_parts_of_units_are_refused(profile: Profile, length: int):
    factors = np.resize(profile.learned["max"]["factors.0"], (2, 34, length))
    assert is_refused(changed(profile, "factors.0", factors))


@PROFILES
@pytest.mark.parametrize(("name", "place", "value"), VALUES)
def test_values_that_no_learning_gives_are_refused(
    profile: Profile, name: str, place: tuple[int, ...], value: Any
):
    array = profile.learned["max"][f"{name}.0"].copy()
    array[place] = value
    assert is_refused(changed(profile, f"{name}.0", array))


@PROFILES
@pytest.mark.parametrize("step", [np.nan, np.inf, 0.0, -0.25])
def test_a_step_that_is_none_is_refused(profile: Profile, step: float):
    assert is_refused(changed(profile, "step", np.array([step], np.float32)))


@PROFILES
def test_an_array_that_is_missing_is_refused(profile: Profile):
    assert all(map(is_refused, incomplete(profile)))


@pytest.mark.slow
@PROFILES
@given(data=st.data())
def test_bytes_of_anything_are_refused_or_pack_and_restore(profile: Profile, data: st.DataObject):
    assert_refused_or_restoring(data, profile, ARRAYS, 20)
