"""Which results of a second measurement are worth another form of a codec."""

from __future__ import annotations

import dataclasses

from engines.calibration.gate.adoption import worth_adopting
from kvstore.codecs.profile import Profile
from tests.unit.engines.calibration.gate.test_choice import measured, row
from tests.unit.kvstore.codecs.learning.calibration import model_profile


def found(**kls: float) -> Profile:
    return measured(*(row(name, kl=kl) for name, kl in kls.items()))


def test_only_a_preset_that_is_a_tenth_closer_gets_another_form() -> None:
    before = found(dense3=0.005, balanced=0.004, safe=0.001)
    after = worth_adopting(found(dense3=0.0049, balanced=0.003, safe=0.002, max=0.006), before)
    assert {x.preset for x in after.rows} == {"balanced", "max"}
    assert {"balanced", "max"} == {x for x in after.learned if "@" not in x} & {
        "dense3",
        "balanced",
        "safe",
        "max",
    }
    assert worth_adopting(found(dense3=0.02), None).rows


def test_windows_go_with_their_preset() -> None:
    known = model_profile()
    windows = dataclasses.replace(known, learned={"dense3": known.learned["dense3"]})
    after = found(dense3=0.0049, max=0.006).with_windows(windows)
    kept = worth_adopting(after, found(dense3=0.005))
    assert "dense3@windows" in after.learned and "dense3@windows" not in kept.learned
