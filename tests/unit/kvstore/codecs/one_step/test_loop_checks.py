"""A profile that no learning can give is one to learn again, with kernels or without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.one_step.one_step import ARRAYS, LEVELS
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
FUSED = profile_of(layout_with(*[(16, 16)] * 20), None, reach=48, layers=10)
APART = profile_of(layout_with(*[(24, 24)] * 20), rope_of(24), reach=50, layers=10)
PROFILES = pytest.mark.parametrize("profile", [FUSED, APART], ids=["fused", "apart"])
VALUES: list[tuple[str, tuple[int, ...], Any]] = [
    *(("rates.0", (0,), x) for x in (np.nan, np.inf, -1.0)),
    ("exponents.0", (0, 0), -28),  # a row of that unit does not fit 32 bits
    ("exponents.0", (0, 0), 21),
    *((f"{name}.0", (0, 0), 31) for name in ("up", "down", "rest")),
    ("finer.0", (0,), 9),
    ("gain_classes.0", (0, 0), 255),
    ("classes.0", (0, 0), 255),
    ("classes.0", (0, 1), 127),  # they fall
    ("classes.0", (0,), 1),  # more of bytes than there are rows
    ("classes.0", (0,), 100),  # more wide ones
    *((LEVELS, (60, 0), x) for x in (0, -5)),
    (LEVELS, (20, 0), 9),  # a byte does not hold fifteen such steps
    (LEVELS, (20, 3), 8),
    (LEVELS, (60, 1), -33),  # a code of one would be below zero
]


@PROFILES
def test_a_learned_profile_is_taken(profile: Profile):
    assert not is_refused(profile)


@PROFILES
@pytest.mark.parametrize("damage", SHAPES)
def test_arrays_of_another_form_are_refused(profile: Profile, damage: str):
    for key in (*(f"{x}.0" for x in ARRAYS), LEVELS, "means"):
        damaged = SHAPES[damage](profile.learned["max"][key])
        assert is_refused(changed(profile, key, damaged)), key


@PROFILES
def test_a_prediction_from_more_channels_than_there_are_is_refused(profile: Profile):
    known = profile.learned["max"]["known.0"]
    longer = np.resize(known, (2, 2 * known.shape[2] + 16, known.shape[2]))
    assert is_refused(changed(profile, "known.0", longer))


@PROFILES
@pytest.mark.parametrize(("key", "place", "value"), VALUES)
def test_values_that_no_learning_gives_are_refused(
    profile: Profile, key: str, place: tuple[int, ...], value: Any
):
    array = profile.learned["max"][key].copy()
    array[place] = value
    assert is_refused(changed(profile, key, array))


@PROFILES
@pytest.mark.parametrize("name", ["largest", "gain_largest"])
@pytest.mark.parametrize("kind", ["f4", "i4"])
def test_symbol_tables_of_other_numbers_are_refused(profile: Profile, name: str, kind: str):
    """A float may be NaN, which no bound excludes."""
    largest = profile.learned["max"][name].astype(kind)
    assert is_refused(changed(profile, name, largest))


@PROFILES
def test_an_array_that_is_missing_is_refused(profile: Profile):
    assert all(map(is_refused, incomplete(profile)))


@pytest.mark.slow
@PROFILES
@given(data=st.data())
def test_bytes_of_anything_are_refused_or_pack_and_restore(profile: Profile, data: st.DataObject):
    assert_refused_or_restoring(data, profile, ARRAYS, 20)
