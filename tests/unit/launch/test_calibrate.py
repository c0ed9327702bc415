"""What ``--presets`` may say."""

from __future__ import annotations

import pytest

from kvstore.codecs.calibrated import CALIBRATED, LEARNABLE
from kvstore.codecs.presets import PRESETS
from kvstore.codecs.seeds import SEEDS
from launch.calibrate import presets_of
from launch.errors import UsageError


def test_groups_and_names() -> None:
    assert set(presets_of(None)) == set(presets_of("ours")) == {*PRESETS, *CALIBRATED}
    assert set(presets_of("all")) == {*PRESETS, *LEARNABLE, *SEEDS}
    assert presets_of("max, tq3") == ("max", "tq3")


def test_each_preset_is_measured_once() -> None:
    found = presets_of("tq3,manthan,ours,tq3")
    assert found[:2] == ("tq3", "manthan") and len(found) == len(set(found))


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(UsageError, match="--presets: no codec named 'tq9'"):
        presets_of("ours,tq9")
