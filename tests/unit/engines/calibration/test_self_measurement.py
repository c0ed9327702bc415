"""A measurement on a thread of its own, with an instrument that plays a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines.calibration.first_order import first_order
from engines.calibration.gate.profiles import locked, profile_path
from engines.calibration.instrument import Instrument, Interrupted
from engines.calibration.self_measurement import SelfMeasurement
from engines.wire import CodecReport
from kvstore.codecs.profile import Profile, load_profile
from kvstore.codecs.quality import Quality
from kvstore.config import StoreConfig
from kvstore.shapes import KVRun
from tests.unit.engines.calibration.test_learn import Blind

WITHIN_S = 240.0


class Talking(Blind):
    """Says what its past is worth: the more it was changed, the further its answers are off.

    ``stop_after``: so many answers, then the engine ends.
    """

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
    """An engine around an instrument, and what became of its measurement."""

    def __init__(self, folder: Path, instrument: Instrument, **how: object) -> None:
        self.adopted = 0
        order = first_order(StoreConfig(), 300, str(folder))
        self.measurement = SelfMeasurement(
            order,
            lambda: instrument,
            self._adopt,
            engine="none",
            resumes=True,
            **how,  # type: ignore[arg-type]
        )

    def _adopt(self) -> None:
        self.adopted += 1

    @property
    def report(self) -> CodecReport:
        return self.measurement.told_in(CodecReport(name="raw"))

    def ended(self) -> str | None:
        """Wait for it; returns why it found nothing, "" if it did, None if it was interrupted."""
        self.measurement.join(WITHIN_S)
        assert not self.measurement.is_running and self.report.progress == ""
        return self.report.ended.error if self.report.ended is not None else None


def untimed(profile: Profile) -> list[Quality]:
    """The rows without what no two runs have in common."""
    return [msgspec.structs.replace(x, prefill_s=None, restore_s=None) for x in profile.rows]


def test_an_interrupted_one_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Talking(stop_after=7)
    one = Engine(tmp_path, first)
    assert one.ended() is None
    assert one.adopted == 0 and first.num_answers == 7
    assert not profile_path(tmp_path, first.fingerprint).exists(), "nobody is served by a part"
    second = Talking()
    two = Engine(tmp_path, second)
    assert two.ended() == "" and two.adopted == 1
    profile = load_profile(profile_path(tmp_path, second.fingerprint))
    assert {x.preset for x in profile.rows} == {"dense3", "balanced", "tq4", "safe"}
    whole = Talking()
    Engine(tmp_path / "other", whole).ended()
    assert second.num_prefills < whole.num_prefills - 8, "texts were not read again"
    # The answer to a case's exact cache is asked for again where it was interrupted.
    assert second.num_answers == whole.num_answers - 7 + 1
    alone = load_profile(profile_path(tmp_path / "other", whole.fingerprint))
    assert untimed(alone) == untimed(profile) and alone.ids == profile.ids
    assert not list((tmp_path / "profiles").glob("*.cases"))


def test_it_ends_when_it_is_closed(tmp_path: Path) -> None:
    one = Engine(tmp_path, Talking())
    until(lambda: one.report.progress)
    one.measurement.close()
    one.ended()
    assert one.adopted == 0


def test_one_process_measures_a_model_at_a_time(tmp_path: Path) -> None:
    """The other waits; what it finds afterwards needs no second measurement."""
    needed = threading.Event()
    instrument = Talking()
    with locked(tmp_path, instrument.fingerprint, lambda: None):
        one = Engine(tmp_path, instrument, is_needed=needed.is_set)
        until(lambda: "another process" in one.report.progress)
    one.ended()
    assert instrument.num_prefills == 0 and one.adopted == 1


def test_what_fails_ends_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instrument = Talking()
    instrument.ropes = ()
    error = Engine(tmp_path, instrument).ended()
    assert error and f"the model is not measured: {error}" in caplog.text


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
