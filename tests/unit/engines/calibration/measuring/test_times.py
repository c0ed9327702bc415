"""Times that are taken again where other work had the processors at the first time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engines.calibration.gate.rules import QUIET, is_doubtful
from engines.calibration.instrument import NOTHING, HeldSession, Instrument
from engines.calibration.measuring.measure import TRIES, timed_again
from engines.calibration.measuring.stopwatch import Stopwatch, processor_waits
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.quality import Quality
from kvstore.workers import processors
from tests.qualities import GOOD
from tests.unit.engines.calibration.test_learn import Blind

CODECS = {name: codec_by_name(name) for name in ("tq3", "tq4")}


def row(preset: str, waited: float | None, context: int = 64) -> Quality:
    times = {"prefill_s": 9.0, "restore_s": 0.9, "waited": waited}
    of_codec = {"preset": preset, "codec_id": CODECS[preset].id, "context": context}
    return msgspec.structs.replace(GOOD, **of_codec, **times)


def stopwatch_of(*waited: float) -> Callable[[], Stopwatch]:
    """Make stopwatches whose blocks take a second; of each this share was waited, then none."""
    ticks, shares = count(), iter(waited)
    waits = iter(y for x in shares for y in (0.0, x))
    return partial(Stopwatch, lambda: float(next(ticks)), lambda: {1: next(waits, 0.0)})


class Indifferent(Blind):
    """Expects every token alike, whatever its past."""

    def log_probs(self, session: HeldSession, tokens: Sequence[int]) -> np.ndarray:
        return np.full((len(tokens), 1400), -np.log(1400), np.float32)


def timed(
    rows: list[Quality], *waited: float, instrument: Instrument | None = None
) -> list[Quality]:
    stopwatch, instrument = stopwatch_of(*waited), instrument or Indifferent()
    return timed_again(instrument, CODECS, rows, num_threads=1, stopwatch=stopwatch)


def test_only_rows_that_were_disturbed_are_timed_again():
    rows = [row("tq3", 0.5), row("tq4", QUIET), row("tq4", None, context=32)]
    found, *others = timed(rows)
    per_1000 = 1000 / 64
    assert others == rows[1:]
    now = {"prefill_s": per_1000, "restore_s": per_1000, "waited": 0.0, "timed_on": processors()}
    assert found == msgspec.structs.replace(rows[0], **now)


def test_rows_that_another_machine_timed_are_timed_again():
    elsewhere = msgspec.structs.replace(row("tq3", 0.0), timed_on="64 x another")
    here = msgspec.structs.replace(row("tq4", 0.0), timed_on=processors())
    found, same = timed([elsewhere, here], 0.05, 0.0)
    assert found.waited == pytest.approx(0.05) and found.prefill_s != elsewhere.prefill_s
    assert not is_doubtful(found) and same == here


def test_a_busy_machine_does_not_replace_quiet_times_of_another():
    elsewhere = msgspec.structs.replace(row("tq3", 0.0), timed_on="64 x another")
    assert timed([elsewhere], *[0.9] * 2 * TRIES) == []
    busy = msgspec.structs.replace(elsewhere, waited=0.95)  # there as well
    assert timed([busy], *[0.9] * 2 * TRIES)[0].timed_on == processors()


def test_the_least_disturbed_attempt_counts():
    shares = [0.6, 0.0, 0.2, 0.3, 0.4, 0.4]  # of the prefill and the restore of each attempt
    (found,) = timed([row("tq3", 0.5)], *shares)
    assert found.waited == pytest.approx(0.3) and is_doubtful(found)
    assert len(shares) == 2 * TRIES


class Remembering(Indifferent):
    """Begins no prompt as one that it has read before."""

    def __init__(self) -> None:
        super().__init__()
        self.beginnings: list[int] = []

    def encode(self, text: str) -> list[int]:
        return list(range(1000, 1400))

    def prefill(self, tokens: Sequence[int], past: HeldSession = NOTHING) -> HeldSession:
        assert len(tokens) == 64 and tokens[0] not in [1000, *self.beginnings]
        self.beginnings.append(tokens[0])
        return super().prefill(tokens, past)


def test_each_attempt_reads_another_prompt():
    """Otherwise an engine's prefix cache would be timed."""
    instrument = Remembering()
    timed([row("tq3", 0.5)], *[0.7] * 2 * TRIES, instrument=instrument)
    assert len(instrument.beginnings) == TRIES


def test_times_that_are_no_better_and_those_of_another_codec_stay_as_they_are():
    assert timed([row("tq3", 0.5)], *[0.7] * 2 * TRIES) == []
    other = msgspec.structs.replace(row("tq3", 0.5), codec_id="earlier")
    assert timed([other]) == []


def test_a_thread_that_had_no_processor_is_seen(tmp_path: Path):
    for thread, waited in ((7, 2_000_000_000), (8, 500_000_000)):
        (tmp_path / str(thread)).mkdir()
        (tmp_path / str(thread) / "schedstat").write_text(f"5 {waited} 1\n")
    (tmp_path / "9").mkdir()  # it has just ended
    assert processor_waits(tmp_path) == {7: 2.0, 8: 0.5}
    assert processor_waits(tmp_path / "none") == {}
