"""A measurement on a thread of its own, with an instrument that plays a model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines.calibration import orders, self_measurement
from engines.calibration.gate.profiles import locked, profile_path
from engines.calibration.instrument import NOTHING, HeldSession, Instrument, Interrupted
from engines.calibration.orders import EARLY_WINDOWS, FIRST_PRESETS, first_order
from engines.calibration.self_measurement import SelfMeasurement
from engines.config import CalibrationOrder, CalibrationReport
from engines.wire import CodecReport
from kvstore.codecs.profile import Profile, load_profile
from kvstore.codecs.quality import Quality
from kvstore.config import StoreConfig
from tests.unit.engines.calibration.test_learn import Blind
from tests.waiting import until

WITHIN_S = 240.0


@dataclass
class Asked:
    """Open questions, each of which is asked anew."""

    ask_unmeasured: Callable[[], bool] = lambda: True
    ask_more: Callable[[], bool] = lambda: False
    ask_times: Callable[[], bool] = lambda: False
    unmeasured = property(lambda self: self.ask_unmeasured())
    learns_on = property(lambda self: self.ask_more())
    times_again = property(lambda self: self.ask_times())


class Talking(Blind):
    """Shows the quality of its past: the more that was changed, the further its answers are off.

    ``stop_after``: so many answers, then the engine ends.
    """

    engine: Engine  # that it measures in

    def __init__(self, stop_after: int = 1 << 30) -> None:
        super().__init__()
        self.num_prefills = self.num_answers = 0
        self._stop_after = stop_after

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        self.num_prefills += 1
        return super().prefill(tokens, past)

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        if self.num_answers >= self._stop_after:
            raise Interrupted("the engine ends")
        self.num_answers += 1
        logits = np.tile(np.arange(300) % 7, (len(tokens), 1)).astype(np.float32)
        logits += float(np.mean([k.astype(np.float32).mean() for k, _ in session.run])) * 1e-6
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))


class Engine:
    """An engine around an instrument, and the outcome of its measurement."""

    def __init__(self, folder: Path, instrument: Instrument, **how: object) -> None:
        self.adopted = 0
        self._instrument, self._made = instrument, threading.Event()
        usual = {"order": first_order(StoreConfig(), 300, str(folder)), "stages": True}
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
    times = dict.fromkeys(("prefill_s", "restore_s", "waited"))
    return [msgspec.structs.replace(x, **times) for x in profile.rows]


def test_a_first_verdict_comes_early_and_is_renewed(tmp_path: Path):
    """Few texts to learn from and to judge by decide for each preset, and then all cases do."""
    adopted: list[Profile] = []
    verdicts: list[bool] = []

    class Adopting(Engine):
        def _adopt(self) -> None:
            super()._adopt()
            adopted.append(load_profile(profile_path(tmp_path, Talking.fingerprint)))
            verdicts.append(self.measurement.has_verdict)

    assert Adopting(tmp_path, Talking()).ended() == ""
    first, early, whole = adopted
    assert verdicts == [False, True, True]
    assert {x.preset for x in first.rows} == set(first.learned) == {"dense3"}
    for profile in (early, whole):
        assert {x.preset for x in profile.rows} == set(FIRST_PRESETS) <= set(profile.learned)
    assert all(x.is_early for x in early.rows) and not any(x.is_early for x in whole.rows)
    assert early.ids["balanced"] != whole.ids["balanced"]
    assert 3 <= len(early.rows[0].texts) < len(whole.rows[0].texts)
    assert EARLY_WINDOWS < orders.FIRST_WINDOWS


def test_one_case_of_each_kind_is_judged_before_other_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Also where a prefix is too short to begin as its text does."""
    caplog.set_level(logging.INFO)
    usual = first_order(StoreConfig(), 1000, str(tmp_path))
    order = msgspec.structs.replace(
        usual, presets=("raw",), fallbacks=(), contexts=(208,), num_scored=128, num_chains=2
    )
    assert Engine(tmp_path, Talking(), order=order, stages=False).ended() == ""
    names = [x.args[0] for x in caplog.records if x.name.endswith("measure") and x.args]
    kinds = [str(x).partition(" ")[0] for x in names]
    assert {"needle", "chains"} <= set(kinds[:3]) and kinds.count("chains") == 2


def test_an_interrupted_one_keeps_its_last_verdict(tmp_path: Path):
    first = Talking(stop_after=3)
    one = Engine(tmp_path, first)
    assert one.ended() is None and one.adopted == 0
    assert not profile_path(tmp_path, first.fingerprint).exists(), "half a profile is not served"
    whole = Talking()
    assert Engine(tmp_path / "other", whole).ended() == ""
    second = Talking(stop_after=whole.num_answers - 1)
    two = Engine(tmp_path, second)
    assert two.ended() is None and two.adopted == 2 and two.measurement.has_verdict
    assert load_profile(profile_path(tmp_path, second.fingerprint)).rows


def test_what_is_known_is_not_learned_again(tmp_path: Path):
    first, second = Talking(), Talking()
    assert Engine(tmp_path, first).ended() == ""
    path = profile_path(tmp_path, first.fingerprint)
    before = load_profile(path)
    by_hand = Engine(tmp_path, second)
    assert by_hand.ended() == "" and by_hand.adopted == 1
    assert second.num_prefills < first.num_prefills - orders.FIRST_WINDOWS
    after = load_profile(path)
    assert after.ids == before.ids and untimed(after) == untimed(before)


class Frail(Talking):
    """Answers otherwise as soon as anything of its past was changed."""

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        logits = super().log_probs(session, tokens)
        past = np.concatenate([k.astype(np.float32).ravel() for k, _ in session.run])
        logits[:, int(np.abs(past).sum() * 1e3) % 300] += 20
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def test_fallbacks_are_measured_where_the_first_preset_loses_too_much(tmp_path: Path):
    whole = Frail()
    assert Engine(tmp_path / "whole", whole).ended() == ""
    profile = load_profile(profile_path(tmp_path / "whole", whole.fingerprint))
    assert [x.preset for x in profile.rows] == ["dense3", "balanced", "tq4", "safe"]
    assert min(x.kl for x in profile.rows) > 0.01
    assert {"dense3", "balanced", "safe"} <= set(profile.learned)


def test_it_learns_on_after_the_verdict_and_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The densest is there at the end."""
    monkeypatch.setattr(orders, "FIRST_WINDOWS", 8)
    monkeypatch.setattr(orders, "MOST_WINDOWS", 16)
    progress: list[str] = []
    path = profile_path(tmp_path, Talking.fingerprint)

    class Stopped(Talking):
        """Ends with the engine when it has learned ``max``."""

        def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
            progress.append(self.engine.report.progress)
            if self.num_prefills > 100:
                raise Interrupted("the engine ends")
            return super().log_probs(session, tokens)

        def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
            if "measuring more: 9 of 16" in self.engine.report.progress:
                self.num_prefills = 1000
            return super().prefill(tokens, past)

    def wanted() -> bool:
        return "max" not in {x.preset for x in load_profile(path).rows}

    one = Engine(tmp_path, Stopped(), open_questions=Asked(ask_more=wanted))
    assert one.ended() == "", "the verdict stands, though learning on was interrupted"
    assert one.measurement.has_verdict and one.adopted == 3
    assert progress[0].startswith("measuring: 0 of ")
    assert any(x.startswith("measuring more: ") and "; dense3 " in x for x in progress)
    first = load_profile(path)
    assert {x.preset for x in first.rows} == set(FIRST_PRESETS)
    two = Engine(tmp_path, Talking(), open_questions=Asked(lambda: False, wanted))
    assert two.ended() == "" and two.adopted == 1
    whole = load_profile(path)
    assert {x.preset for x in whole.rows} == {*FIRST_PRESETS, "max"}
    assert first.ids["dense3"] != whole.ids["dense3"]
    three = Engine(tmp_path, Talking(), open_questions=Asked(lambda: False, wanted))
    assert three.ended() == "" and three.adopted == 0


def test_a_verdict_stands_if_no_more_can_be_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    class Unlearned(Talking):
        def encode(self, text: str) -> list[int]:
            if self.engine.adopted == 3:
                raise MemoryError("no text is left")
            return super().encode(text)

    one = Engine(tmp_path, Unlearned(), open_questions=Asked(ask_more=lambda: True))
    assert one.ended() == "" and one.adopted == 3
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
        one = Engine(tmp_path, instrument, open_questions=Asked(needed.is_set))
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

    wanted = Asked(lambda: False, ask_times=times_again)
    again = Engine(tmp_path, Talking(), open_questions=wanted)
    assert again.ended() == "" and again.adopted >= 1
    found = load_profile(path)
    assert found.ids == profile.ids and len(found.rows) == len(profile.rows)
    assert all(x.waited is not None and x.waited < 1 for x in found.rows)
    assert untimed(found) == untimed(profile)


def test_one_that_waits_for_a_quiet_machine_does_not_count_as_running(tmp_path: Path):
    wanted = Asked(lambda: False, ask_times=lambda: True)
    one = Engine(tmp_path, Talking(), open_questions=wanted)
    until(lambda: one.measurement.has_verdict and not one.measurement.is_running)
    one.measurement.close()
    assert one.ended() is None and one.adopted == 0


def test_a_failure_ends_the_measurement_only(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    instrument = Talking()
    instrument.ropes = ()
    error = Engine(tmp_path, instrument).ended()
    assert error and f"the model is not measured: {error}" in caplog.text


def order_of(folder: Path, *presets: str) -> CalibrationOrder:
    sizes = {"contexts": (128,), "num_windows": 2, "window_tokens": 128, "num_scored": 16}
    paths = {"data_path": str(folder), "report_path": str(folder / "report.json")}
    return CalibrationOrder(presets=presets, depths=(), num_chains=0, **sizes, **paths)


@pytest.mark.slow
def test_an_order_whose_report_is_awaited_replaces_what_was_learned_before(tmp_path: Path):
    ids: set[str] = set()
    path = tmp_path / "report.json"
    order = order_of(tmp_path, "dense3", "max", "raw")
    for num_windows in (2, 3):
        wanted = msgspec.structs.replace(order, num_windows=num_windows)
        one = Engine(tmp_path, Talking(), order=wanted, stages=False)
        assert one.ended() == "" and one.adopted == len(order.presets)
        report = msgspec.json.decode(path.read_bytes(), type=CalibrationReport)
        assert [x.preset for x in one.report.found] == [x.preset for x in report.rows]
        assert [x.preset for x in report.rows] == ["dense3", "max", "raw"]
        profile = load_profile(Path(report.profile))
        assert report.rows[0].codec_id.endswith(profile.ids["dense3"])
        ids.add(profile.ids["dense3"])
    assert len(ids) == 2


def test_an_order_that_is_interrupted_keeps_the_presets_that_it_has_measured(tmp_path: Path):
    order = order_of(tmp_path, "dense3", "raw")
    whole, elsewhere = Talking(), msgspec.structs.replace(order, data_path=str(tmp_path / "other"))
    assert Engine(tmp_path, whole, order=elsewhere, stages=False).ended() == ""
    half = Talking(stop_after=whole.num_answers - 1)
    assert Engine(tmp_path, half, order=order, stages=False).ended() is None
    profile = load_profile(profile_path(tmp_path, half.fingerprint))
    assert {x.preset for x in profile.rows} == set(profile.learned) == {"dense3"}


def test_a_preset_is_measured_before_the_next_one_is_learned(tmp_path: Path):
    """And the answers by the exact cache are computed once for all of them."""
    found_when_judged: list[list[str]] = []

    class Watched(Talking):
        def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
            found_when_judged.append([x.preset for x in self.engine.report.found])
            return super().log_probs(session, tokens)

    usual = first_order(StoreConfig(), 300, str(tmp_path))
    order = msgspec.structs.replace(usual, presets=("tq4", "dense3", "raw"), fallbacks=())
    one = Engine(tmp_path, Watched(), order=order, stages=False)
    assert one.ended() == ""
    assert [x.preset for x in one.report.found] == ["tq4", "dense3", "raw"]
    assert not any(x.texts for x in one.report.found)
    num_cases = found_when_judged.count(["tq4"])
    assert num_cases == found_when_judged.count(["tq4", "dense3"])
    assert found_when_judged.count([]) == 2 * num_cases + 1, "a needle is not answered"


def test_an_order_that_fails_leaves_no_report(tmp_path: Path):
    path = tmp_path / "report.json"
    order = CalibrationOrder(
        presets=("raw",), contexts=(1 << 20,), data_path=str(tmp_path), report_path=str(path)
    )
    one = Engine(tmp_path, Talking(), order=order, stages=False)
    assert "no text has 1048832 tokens" in (one.ended() or "")
    assert one.adopted == 0 and not path.exists()
