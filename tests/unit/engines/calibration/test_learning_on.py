"""What is ordered after a first verdict, and what of its findings is worth another form."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engines.calibration import learning_on
from engines.calibration.first_order import FIRST_WINDOWS, first_order
from engines.calibration.learning_on import MOST_WINDOWS, further_order, worth_adopting
from kvstore.codecs.profile import Profile
from kvstore.config import StoreConfig
from tests.unit.engines.calibration.gate.test_choice import measured, row
from tests.unit.kvstore.codecs.learning.calibration import model_profile


def test_it_judges_by_the_same_cases(tmp_path: Path) -> None:
    order = first_order(StoreConfig(disk_codec="tq3"), 8192, str(tmp_path))
    more = further_order(order, 1)
    assert more.num_windows == MOST_WINDOWS > order.num_windows
    assert set(more.presets) == {"dense3", "balanced", "safe", "max"}
    same = ("contexts", "num_scored", "depths", "num_chains", "chunk_tokens", "window_tokens")
    assert [getattr(more, x) for x in same] == [getattr(order, x) for x in same]


def test_rows_to_learn_from_fit_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = first_order(StoreConfig(), 8192, str(tmp_path))
    of_token = learning_on.MOST_ROW_BYTES // (2 * order.window_tokens * 20)
    assert further_order(order, of_token).num_windows <= 20
    assert further_order(order, 1 << 40).num_windows == FIRST_WINDOWS, "those were read before"


def found(**kls: float) -> Profile:
    return measured(*(row(name, kl=kl) for name, kl in kls.items()))


def test_only_what_is_a_tenth_closer_gets_another_form() -> None:
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
