"""A profile whose integers no learning can give is one to learn again, and nothing worse."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codecs.fixed_rate.rate_integers import ARRAYS, RateIntegers
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.shapes import Rope
from tests.unit.kvstore.codecs.damages import (
    SHAPES,
    assert_refused_or_restoring,
    changed,
    incomplete,
    is_refused,
)
from tests.unit.kvstore.codecs.fixed_rate.integer_models import layout_with, profile_of, rope_of

LAYOUT = layout_with((64, 64), (64, 64))
PROFILE = profile_of(LAYOUT, rope_of(64))
(SHAPE,) = stack_shapes(Scope("head"), LAYOUT)
KNOWN = {name: PROFILE.learned["dense3"][f"{name}.0"] for name in ARRAYS}
LAST = (-1, -1, -1)

VALUES: list[tuple[str, tuple[int, ...], Any]] = [
    *(("bits", (0, 0), 7), ("bits", (0, 0), 255), ("gain_steps", (0, 0), 32767)),
    ("bits", (0, 1), 0),  # not falling
    *(("levels", (0, 0, 0), 128), ("levels", LAST, 255), ("decode", (0, 0, 0), -128)),
    *(("encode", (0, 0), 32767), ("encode", (0, 0, 0), -32768)),
    ("bounds", (0, 0, 0), -1),
    ("bounds", (0, 0, 3), 0),  # not ascending
    ("bounds", LAST, 12345),  # of a component without bits
    ("bounds", (0, 0, 31), 2**31 - 2),  # more than six bits can hold
    *((name, (0,), x) for name in ("scales", "units", "rates") for x in (np.nan, np.inf, -1.0)),
    ("scales", (0,), 0.0),
    ("scales", (0,), 0.3),  # multiplying by it would round
]


def test_learned_integers_are_taken():
    RateIntegers(SHAPE, **KNOWN)
    assert not is_refused(PROFILE)


@pytest.mark.parametrize("damage", SHAPES)
@pytest.mark.parametrize("name", [*ARRAYS, "means"])
def test_arrays_of_another_form_are_refused(name: str, damage: str):
    key = name if name == "means" else f"{name}.0"
    array = SHAPES[damage](PROFILE.learned["dense3"][key])
    assert is_refused(changed(PROFILE, key, array))


@pytest.mark.parametrize(("name", "place", "value"), VALUES)
def test_integers_that_no_learning_gives_are_refused(name: str, place: tuple[int, ...], value: Any):
    array = KNOWN[name].copy()
    array[place] = value
    with pytest.raises(ValueError, match=f"out of range:.* {name}"):
        RateIntegers(SHAPE, **{**KNOWN, name: array})
    assert is_refused(changed(PROFILE, f"{name}.0", array))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_mean_that_is_no_number_is_refused(value: float):
    means = PROFILE.learned["dense3"]["means"].copy()
    means[77] = value
    assert is_refused(changed(PROFILE, "means", means))


OTHER_TURNS = [(), (rope_of(64),), (rope_of(64),) * 3]
TOO_WIDE = (rope_of(128),) * 2  # the kernels would turn the memory after the row


@pytest.mark.parametrize("ropes", [*OTHER_TURNS, TOO_WIDE])
def test_turns_of_other_layers_are_refused(ropes: tuple[Rope, ...]):
    assert is_refused(dataclasses.replace(PROFILE, ropes=ropes))


def test_an_array_that_is_missing_is_refused():
    assert all(map(is_refused, incomplete(PROFILE)))


@given(st.data())
def test_bytes_of_anything_are_refused_or_pack_and_restore(data: st.DataObject):
    assert_refused_or_restoring(data, PROFILE, ARRAYS, 70)
