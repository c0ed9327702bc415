"""A measurement that was interrupted, and the results that it left for the next."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from engines.calibration.first_order import first_order
from engines.calibration.measuring.cases import Case
from engines.calibration.measuring.metrics import CaseResult, Drift, digest_of
from engines.calibration.unfinished import Unfinished
from engines.config import CalibrationOrder
from kvstore.config import StoreConfig
from tests.unit.kvstore.codecs.learning.calibration import FINGERPRINT, model_profile

MOVED = Drift(kl=(0.1,), same_top=(True,), loss=(0.5,), delta_p=(-0.2,))
RESULTS = [
    CaseResult(case="one", text="a", context=128, codec_id="tq4.2", moved=MOVED),
    CaseResult(case="two", text="needle", context=128, codec_id="tq4.2", found=True),
    CaseResult(case="chains", text="chains", context=128, chains={"tables": MOVED}),
    CaseResult(case="three", text="needle", context=128),
]


@pytest.fixture
def order(tmp_path: Path) -> CalibrationOrder:
    return first_order(StoreConfig(), 8192, str(tmp_path))


def files(order: CalibrationOrder) -> list[str]:
    return sorted(x.suffix for x in (Path(order.data_path) / "profiles").glob("*.*.*"))


def test_results_come_back_one_by_one(order: CalibrationOrder) -> None:
    one = Unfinished.of(order, FINGERPRINT)
    assert one.results() == [] and one.learned() is None
    one.keep_results(RESULTS[:2])
    one.keep_results(RESULTS[2:])
    assert Unfinished.of(order, FINGERPRINT).results() == RESULTS


def test_a_line_that_was_cut_off_costs_that_case_only(order: CalibrationOrder) -> None:
    one = Unfinished.of(order, FINGERPRINT)
    one.keep_results(RESULTS[:2])
    (path,) = (Path(order.data_path) / "profiles").glob("*.cases")
    path.write_bytes(path.read_bytes()[:-9])
    assert one.results() == RESULTS[:1]
    one.keep_results(RESULTS[2:])
    assert one.results() == [RESULTS[0], *RESULTS[2:]]


def test_learned_arrays_come_back_from_the_file(order: CalibrationOrder) -> None:
    profile = model_profile()
    kept = Unfinished.of(order, FINGERPRINT).keep_learned(profile)
    again = Unfinished.of(order, FINGERPRINT).learned()
    assert kept.ids == again.ids == profile.ids
    more = dataclasses.replace(again, learned={"dense3": again.learned["dense3"]})
    Unfinished.of(order, FINGERPRINT).keep_learned(more)
    assert again.ids == profile.ids, "its arrays are those of the older file"
    (path,) = (Path(order.data_path) / "profiles").glob("*.learned")
    path.write_bytes(path.read_bytes()[:-1])
    assert Unfinished.of(order, FINGERPRINT).learned() is None


def test_another_order_knows_nothing_and_the_end_removes_all(order: CalibrationOrder) -> None:
    Unfinished.of(order, FINGERPRINT).keep_results(RESULTS)
    other = msgspec.structs.replace(order, num_scored=65)
    assert Unfinished.of(other, FINGERPRINT).results() == []
    Unfinished.of(other, FINGERPRINT).keep_learned(model_profile())
    assert files(order) == [".cases", ".learned"]
    Unfinished.of(order, FINGERPRINT).remove()
    assert files(order) == []


def test_a_case_is_known_by_its_tokens() -> None:
    cases = [
        Case("a", (1, 2), (3, 4)),
        Case("a", (1, 2, 3), (4,)),
        Case("a", (1, 2), (3, 4), num_answer=1),
    ]
    assert len({digest_of(x) for x in cases}) == 3
    assert digest_of(cases[0]) == digest_of(dataclasses.replace(cases[0], name="b"))
