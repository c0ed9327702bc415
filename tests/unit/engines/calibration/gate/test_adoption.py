"""Which results of a second measurement are worth another form of a codec."""

from __future__ import annotations

import dataclasses

from engines.calibration.gate.rules import Bound, worth_adopting
from kvstore.codecs.profile import Profile
from kvstore.shapes import Rope
from tests.unit.engines.calibration.gate.test_choice import measured, row
from tests.unit.kvstore.codecs.learning.calibration import model_profile


def found(**kls: float) -> Profile:
    return measured(*(row(name, kl=kl) for name, kl in kls.items()))


def test_only_a_preset_that_is_a_tenth_closer_gets_another_form() -> None:
    before = found(dense3=0.005, balanced=0.004, safe=0.001)
    after = worth_adopting(
        found(dense3=0.0049, balanced=0.003, safe=0.002, max=0.006), before, Bound()
    )
    assert {x.preset for x in after.rows} == {"balanced", "max"}
    assert {"balanced", "max"} == {x for x in after.learned if "@" not in x} & {
        "dense3",
        "balanced",
        "safe",
        "max",
    }
    assert worth_adopting(found(dense3=0.02), None, Bound()).rows


def test_windows_go_with_their_preset() -> None:
    known = model_profile()
    windows = dataclasses.replace(known, learned={"dense3": known.learned["dense3"]})
    after = found(dense3=0.0049, max=0.006).with_windows(windows)
    kept = worth_adopting(after, found(dense3=0.005), Bound())
    assert "dense3@windows" in after.learned and "dense3@windows" not in kept.learned


def test_a_form_that_keeps_the_bound_replaces_one_that_does_not() -> None:
    """Else the fallbacks, which are not measured where the new form serves, would be missing."""
    before = found(dense3=0.0104, balanced=0.003)
    after = found(dense3=0.0097, balanced=0.0029)
    kept = worth_adopting(after, before, Bound(kl=0.01))
    assert {x.preset for x in kept.rows} == {"dense3"}


def test_forms_of_keys_that_were_rotated_in_another_way_are_not_compared() -> None:
    before = dataclasses.replace(found(dense3=0.005), ropes=(None,))
    after = dataclasses.replace(found(dense3=0.0049), ropes=(Rope((1.0,), side="values"),))
    assert worth_adopting(after, before, Bound()) is after
