"""A measurement on a thread of its own, with an instrument that plays a model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines.calibration import first_order as orders
from engines.calibration import self_measurement
from engines.calibration.first_order import FIRST_PRESETS, first_order
from engines.calibration.gate import rules
from engines.calibration.gate.profiles import locked, profile_path
from engines.calibration.instrument import Instrument, Interrupted
from engines.calibration.measuring.metrics import widened
from engines.calibration.self_measurement import OpenQuestions, SelfMeasurement
from engines.config import CalibrationOrder, CalibrationReport
from engines.wire import CodecReport
from kvstore.codecs.profile import Profile, load_profile
from kvstore.codecs.quality import Quality
from kvstore.config import StoreConfig
from kvstore.shapes import KVRun
from tests.unit.engines.calibration.test_learn import Blind
from tests.waiting import until

WITHIN_S = 240.0
TIMELESS = {"prefill_s": None, "restore_s": None, "waited": None}


class Talking(Blind):
    """Shows the quality of its past: the more that was changed, the further its answers are off.

    ``stop_after``: so many answers, then the engine ends.
    """

    engine: Engine  # that it measures in

    def __init__(self, stop_after: int = 1 << 30) -> None:
        super().__init__()
        self.num_prefills = self.num_answers = 0
        self._stop_after = stop_after

    def prefill(self, tokens: Sequence[int], past: KVRun = ()) -> KVRun:
        self.num_prefills += 1
        return super().prefill(tokens, past)

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        if self.num_answers >= self._stop_after:
            raise Interrupted("the engine ends")
        self.num_answers += 1
        logits = np.tile(np.arange(300) % 7, (len(tokens), 1)).astype(np.float32)
        logits += float(np.mean([k.astype(np.float32).mean() for k, _ in run])) * 1e-6
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))


class Engine:
    """An engine around an instrument, and the outcome of its measurement."""

    def __init__(self, folder: Path, instrument: Instrument, **how: object) -> None:
        self.adopted = 0
        self._instrument, self._made = instrument, threading.Event()
        usual = {"order": first_order(StoreConfig(), 300, str(folder)), "resumes": True}
        self.measurement = SelfMeasurement(
            open_instrument=self._open,
            adopt=self._adopt,
            engine="none",
            **(usual | how),  # type: ignore[arg-type]
        )
        self._made.set()

    def _open(self) -> Instrument:
        """Give the measuring thread its instrument, once this object is whole."""
        self._made.wait(WITHIN_S)
        if isinstance(self._instrument, Talking):
            self._instrument.engine = self
        return self._instrument

    def _adopt(self) -> None:
        self.adopted += 1

    @property
    def report(self) -> CodecReport:
        return self.measurement.with_progress(CodecReport(name="raw"))

    def ended(self) -> str | None:
        """Wait for it; returns why it found nothing, "" if it did, None if it was interrupted."""
        self.measurement.join(WITHIN_S)
        assert not self.measurement.is_running and self.report.progress == ""
        return self.report.ended.error if self.report.ended is not None else None


def untimed(profile: Profile) -> list[Quality]:
    """The rows without times, which differ between any two runs."""
    return [
        msgspec.structs.replace(x, prefill_s=None, restore_s=None, waited=None)
        for x in profile.rows
    ]


def test_an_interrupted_one_goes_on_where_it_was(tmp_path: Path):
    first = Talking(stop_after=7)
    one = Engine(tmp_path, first)
    assert one.ended() is None
    assert one.adopted == 0 and first.num_answers == 7
    assert not profile_path(tmp_path, first.fingerprint).exists(), (
        "a part of a profile is not served"
    )
    second = Talking()
    two = Engine(tmp_path, second)
    assert two.ended() == "" and two.adopted == 1
    profile = load_profile(profile_path(tmp_path, second.fingerprint))
    assert {x.preset for x in profile.rows} == {"dense3", "balanced"}
    whole = Talking()
    Engine(tmp_path / "other", whole).ended()
    assert second.num_prefills < whole.num_prefills - 8, "texts were not read again"
    # The answer to a case's exact cache is asked for again where it was interrupted.
    assert second.num_answers == whole.num_answers - 7 + 1
    alone = load_profile(profile_path(tmp_path / "other", whole.fingerprint))
    assert untimed(alone) == untimed(profile) and alone.ids == profile.ids
    assert not list((tmp_path / "profiles").glob("*.cases"))


class Frail(Talking):
    """Answers otherwise as soon as anything of its past was changed."""

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        logits = super().log_probs(run, tokens)
        past = np.concatenate([k.astype(np.float32).ravel() for k, _ in run])
        logits[:, int(np.abs(past).sum() * 1e3) % 300] += 20
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def test_fallbacks_are_measured_where_the_first_preset_loses_too_much(tmp_path: Path):
    whole = Frail()
    assert Engine(tmp_path / "whole", whole).ended() == ""
    profile = load_profile(profile_path(tmp_path / "whole", whole.fingerprint))
    assert [x.preset for x in profile.rows] == ["dense3", "balanced", "tq4", "safe"]
    assert min(x.kl for x in profile.rows) > 0.01
    assert {"dense3", "balanced", "safe"} <= set(profile.learned)

    first = Frail(stop_after=whole.num_answers - 3)
    assert Engine(tmp_path, first).ended() is None
    second = Frail()
    assert Engine(tmp_path, second).ended() == ""
    assert second.num_answers < 8, "presets and fallbacks go on where they were"
    again = load_profile(profile_path(tmp_path, second.fingerprint))
    assert untimed(again) == untimed(profile) and again.ids == profile.ids


def test_it_learns_on_after_the_verdict_and_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The densest is there at the end; arrays learned first stay where they are as close."""
    monkeypatch.setattr(orders, "FIRST_WINDOWS", 8)
    monkeypatch.setattr(orders, "MOST_WINDOWS", 16)
    progress: list[str] = []
    path = profile_path(tmp_path, Talking.fingerprint)

    class Stopped(Talking):
        """Ends with the engine when a few cases were judged again."""

        def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
            progress.append(self.engine.report.progress)
            if sum(x.startswith("learning on: ") for x in progress) > 5:
                raise Interrupted("the engine ends")
            return super().log_probs(run, tokens)

    def wanted() -> bool:
        return "max" not in {x.preset for x in load_profile(path).rows}

    one = Engine(tmp_path, Stopped(), wanted=OpenQuestions(learns_on=wanted))
    assert one.ended() == "", "the verdict stands, though learning on was interrupted"
    assert one.measurement.has_verdict and one.adopted == 1
    assert progress[0].startswith("measuring: ") and "learning on: 1 of " in progress[-1]
    first = load_profile(path)
    assert {x.preset for x in first.rows} == set(FIRST_PRESETS)
    second = Talking()
    two = Engine(tmp_path, second, wanted=OpenQuestions(lambda: False, wanted))
    assert two.ended() == "" and two.adopted == 1
    whole = load_profile(path)
    assert {x.preset for x in whole.rows if ":" not in x.preset} == {*FIRST_PRESETS, "max"}
    assert first.ids["dense3"] in (whole.ids["dense3"], whole.before().ids["dense3"])
    assert second.num_prefills < 16 + len(progress), "texts were not read again"
    three = Engine(tmp_path, Talking(), wanted=OpenQuestions(lambda: False, wanted))
    assert three.ended() == "" and three.adopted == 0


@pytest.mark.parametrize("kind", [OSError, RuntimeError, MemoryError])
def test_a_verdict_stands_if_no_more_can_be_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Exception]
):
    class Unlearned(Talking):
        def encode(self, text: str) -> list[int]:
            if self.engine.measurement.has_verdict:
                raise kind("no text is left")
            return super().encode(text)

    one = Engine(tmp_path, Unlearned(), wanted=OpenQuestions(learns_on=lambda: True))
    assert one.ended() == "" and one.adopted == 1
    assert "no more is learned of the model" in caplog.text and "no text is left" in caplog.text


def test_it_ends_when_it_is_closed(tmp_path: Path):
    one = Engine(tmp_path, Talking())
    until(lambda: one.report.progress)
    one.measurement.close()
    one.ended()
    assert one.adopted == 0


def test_one_process_measures_a_model_at_a_time(tmp_path: Path):
    """The other waits; the profile that it finds afterwards needs no second measurement."""
    needed = threading.Event()
    instrument = Talking()
    with locked(tmp_path, instrument.fingerprint, lambda: None):
        one = Engine(tmp_path, instrument, wanted=OpenQuestions(needed.is_set))
        until(lambda: "another process" in one.report.progress)
    one.ended()
    assert instrument.num_prefills == 0 and one.adopted == 1


def busy(profile: Profile) -> Profile:
    """The same profile as if it had been timed on a busy machine."""
    rows = (msgspec.structs.replace(x, waited=1.0, prefill_s=1e6) for x in profile.rows)
    return replace(profile, rows=tuple(rows))


def test_what_was_timed_on_a_busy_machine_is_timed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(self_measurement, "TIMED_AGAIN_S", (0.01, 0.02))
    instrument = Talking()
    path = profile_path(tmp_path, instrument.fingerprint)
    assert Engine(tmp_path, instrument).ended() == ""
    profile = busy(load_profile(path))
    profile.save(path)

    def times_again() -> bool:
        return any(x.prefill_s == 1e6 for x in load_profile(path).rows)

    wanted = OpenQuestions(lambda: False, times_again=times_again)
    again = Engine(tmp_path, Talking(), wanted=wanted)
    assert again.ended() == "" and again.adopted >= 1
    found = load_profile(path)
    assert found.ids == profile.ids and len(found.rows) == len(profile.rows)
    assert all(x.waited is not None and x.waited < 1 for x in found.rows)
    assert untimed(found) == untimed(profile)


def test_one_that_waits_for_a_quiet_machine_does_not_count_as_running(tmp_path: Path):
    wanted = OpenQuestions(lambda: False, times_again=lambda: True)
    one = Engine(tmp_path, Talking(), wanted=wanted)
    until(lambda: one.measurement.has_verdict and not one.measurement.is_running)
    one.measurement.close()
    assert one.ended() is None and one.adopted == 0


def test_a_failure_ends_the_measurement_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    instrument = Talking()
    instrument.ropes = ()
    error = Engine(tmp_path, instrument).ended()
    assert error and f"the model is not measured: {error}" in caplog.text


class Sensitive(Talking):
    """Expects one token the more, the larger the keys of its past are."""

    def log_probs(self, run: KVRun, tokens: Sequence[int]) -> np.ndarray:
        logits = super().log_probs(run, tokens).copy()
        logits[:, 0] += float(np.mean([widened(k, self.layout).mean() for k, _ in run]))
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def test_arrays_learned_from_more_texts_outlive_a_measurement_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(orders, "FIRST_WINDOWS", 8)
    monkeypatch.setattr(orders, "MOST_WINDOWS", 16)
    monkeypatch.setattr(rules, "WORTH", 2.0)  # a model that plays one gains nothing by texts
    path = profile_path(tmp_path, Talking.fingerprint)
    measured: list[Profile] = []

    def wanted() -> bool:
        measured.append(load_profile(path))
        return len(measured) == 1

    assert Engine(tmp_path, Sensitive(), wanted=OpenQuestions(learns_on=wanted)).ended() == ""
    taught = load_profile(path)
    assert taught.ids["balanced"] != measured[0].ids["balanced"]
    monkeypatch.setattr(rules, "WORTH", 0.0)  # nor does it lose anything by few
    by_hand = Engine(tmp_path, Sensitive())
    assert by_hand.ended() == "" and by_hand.adopted == 1
    assert load_profile(path).ids == taught.ids


def test_an_order_whose_report_is_awaited_replaces_what_was_learned_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rules, "WORTH", 0.0)  # an engine itself would keep what it has
    path = tmp_path / "report.json"
    order = CalibrationOrder(
        presets=("dense3", "max", "raw"),
        contexts=(128,),
        num_windows=2,
        window_tokens=128,
        num_scored=16,
        depths=(),
        num_chains=0,
        data_path=str(tmp_path),
        report_path=str(path),
    )
    for num_windows in (2, 3):
        wanted = msgspec.structs.replace(order, num_windows=num_windows)
        one = Engine(tmp_path, Talking(), order=wanted, resumes=False)
        assert one.ended() == "" and one.adopted == 1
        report = msgspec.json.decode(path.read_bytes(), type=CalibrationReport)
        assert [x.preset for x in report.rows] == ["dense3", "max", "raw"] and report.bounds
        profile = load_profile(Path(report.profile))
        assert report.rows[0].codec_id.endswith(profile.ids["dense3"])
    assert profile.before().ids["dense3"] != profile.ids["dense3"]


def test_an_order_that_fails_leaves_no_report(tmp_path: Path):
    path = tmp_path / "report.json"
    order = CalibrationOrder(
        presets=("raw",), contexts=(1 << 20,), data_path=str(tmp_path), report_path=str(path)
    )
    one = Engine(tmp_path, Talking(), order=order, resumes=False)
    assert "no text has 1048832 tokens" in (one.ended() or "")
    assert one.adopted == 0 and not path.exists()
