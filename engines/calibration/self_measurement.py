"""Measures the model that an engine serves, in the engine's own process and idle moments.

The work is done on a thread of the lowest priority. What needs the model goes through an
``Instrument`` that waits for idle moments of the engine; all else is arithmetic on arrays. When a
profile was written, the engine chooses its codecs again. After the first verdict more is learned
in the same way. If anything fails here, serving goes on unchanged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from engines.calibration.agreement import Partners
from engines.calibration.first_order import further_order
from engines.calibration.footprint import large_arrays_apart, one_thread, return_freed_memory
from engines.calibration.gate.profiles import locked, profile_path, save
from engines.calibration.gate.rules import Bound, is_disturbed, was_learned_on, worth_adopting
from engines.calibration.instrument import Instrument
from engines.calibration.instrument import Interrupted as Interrupted
from engines.calibration.measuring.times import timed_again
from engines.calibration.survey import (
    CannotCalibrate,
    check_contexts,
    codecs_to_measure,
    survey_report,
)
from engines.calibration.unfinished import Unfinished
from engines.config import CalibrationOrder
from engines.wire import CodecReport, MeasurementEnd
from kvstore.codecs.profile import BEFORE, Profile, load_profile
from kvstore.codecs.quality import Quality
from kvstore.errors import Corrupt, Mismatch, UnknownCodec
from kvstore.workers import lower_priority

logger = logging.getLogger(__name__)

CLOSE_S: Final = 2.0
LOG_EVERY_S: Final = 60.0  # in the log; ``progress`` always says the latest
LOOK_EVERY_S: Final = 2.0
# Until the next attempt to time a model on a quiet machine; doubled each time, up to the second.
TIMED_AGAIN_S: Final = (60.0, 3600.0)
REPORT_BYTES: Final = 1 << 20  # more than a report has


class OpenQuestions(NamedTuple):
    """Says which findings are wanted; asked on the measuring thread.

    Attributes:
        is_needed: whether there is no verdict yet; asked first, and after another process has
            measured the same model.
        learns_on: whether more is to be learned; asked once there is a verdict. Only of a
            measurement that ``resumes``.
        times_again: whether the verdict hangs on times that other work disturbed; asked last, and
            after each attempt to time it on a quieter machine. Only of one that ``resumes``.
    """

    is_needed: Callable[[], bool] = lambda: True
    learns_on: Callable[[], bool] = lambda: False
    times_again: Callable[[], bool] = lambda: False


ALL: Final = OpenQuestions()  # what is asked for by hand


@contextmanager
def _room_for(path: str) -> Iterator[Callable[[bytes], object]]:
    """Reserve room for a report, so that a disk that is full by then takes it; "" = for none.

    Yields the function that writes it. Raises ``CannotCalibrate``: there is no room now.
    """
    if not path:
        yield lambda report: None
        return
    reserved = Path(path).with_suffix(".reserved")
    try:
        with reserved.open("wb", buffering=0) as file:
            try:
                file.write(bytes(REPORT_BYTES))
                os.fsync(file.fileno())
            except OSError as error:
                where = f"no report can be written into {reserved.parent}; free some space"
                raise CannotCalibrate(f"{where}: {error.strerror}") from error
            file.seek(0)

            def write(report: bytes) -> None:
                file.write(report)
                file.truncate()
                reserved.replace(path)

            yield write
    finally:
        reserved.unlink(missing_ok=True)


def _all_of_it(profile: Profile) -> Profile:
    return profile


class SelfMeasurement:
    """One measurement, begun at once. Its methods can be called from any thread."""

    def __init__(
        self,
        order: CalibrationOrder,
        open_instrument: Callable[[], Instrument],
        adopt: Callable[[], None],
        *,
        engine: str,
        resumes: bool = False,
        wanted: OpenQuestions = ALL,
        partners: Partners | None = None,
    ) -> None:
        """Begin to measure.

        Args:
            open_instrument: called on the measuring thread. May raise ``ValueError``: this model
                cannot be measured. The instrument's methods raise ``Interrupted`` once the engine
                ends.
            adopt: called on the measuring thread once the profile was written, also by another
                process that was measuring this model.
            engine: the name and version of the engine, for the report.
            resumes: keep what is done in the data folder, go on from there after a restart, and
                let no two processes measure one model at a time.
            wanted: see there.
            partners: the other ranks, if the engine has several.
        """
        self._order = order
        self._open_instrument = open_instrument
        self._adopt = adopt
        self._engine = engine
        self._resumes = resumes
        self._wanted = wanted
        self._has_verdict = False
        self._partners = partners
        self._progress = ""
        self._ended: MeasurementEnd | None = None
        self._logged_s = float("-inf")
        self._closing = threading.Event()
        self._is_waiting = False
        self._thread = threading.Thread(target=self._run, name="thermocline-measure", daemon=True)
        self._thread.start()

    @property
    def _is_awaited(self) -> bool:
        """True if the report is awaited: every preset of the order is then kept."""
        return bool(self._order.report_path)

    @property
    def is_running(self) -> bool:
        """True while it measures; one that only waits for a quiet machine may be closed."""
        return self._thread.is_alive() and not self._is_waiting

    @property
    def has_verdict(self) -> bool:
        """True once the model is measured, though more may still be learned."""
        return self._has_verdict

    def with_progress(self, report: CodecReport) -> CodecReport:
        """The report with this measurement's progress, and with its end."""
        return msgspec.structs.replace(report, progress=self._progress, ended=self._ended)

    def close(self) -> None:
        """Have it end at the next opportunity. The instrument must refuse its steps, too."""
        self._closing.set()

    def join(self, within_s: float = CLOSE_S) -> None:
        """Wait for the end of the thread, but not for ever: it is a daemon."""
        self._thread.join(within_s)

    def _run(self) -> None:
        lower_priority()
        try:
            # An engine whose report is awaited was started to measure: no user needs the cores.
            with nullcontext() if self._is_awaited else one_thread(), large_arrays_apart():
                self._measure()
            self._ended = MeasurementEnd(time.time())
        except Interrupted:
            again = "goes on" if self._resumes else "begins again"
            logger.info("measuring was interrupted; it %s with the engine's next start", again)
        except (CannotCalibrate, UnknownCodec, OSError, ValueError) as error:
            words = " ".join(str(error).split())
            logger.warning("the model is not measured: %s", words)
            self._give_up(words)
        except Exception as error:  # the edge of this thread: nothing here may end the service
            logger.exception("the model is not measured")
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._progress = ""

    def _give_up(self, error: str) -> None:
        self._ended = MeasurementEnd(time.time(), error)
        if self._partners is not None:
            self._partners.give_up(error)

    def _measure(self) -> None:
        instrument = self._open_instrument()
        if self._is_awaited:
            check_contexts(instrument, self._order.contexts)
        with self._alone(instrument.fingerprint) as has_waited:
            if has_waited:  # the other may have found what is wanted
                self._adopt()
            if self._wanted.is_needed():
                logger.info(
                    "measuring what each codec costs this model; until then nothing is lost"
                )
                self._carry_out(self._order, instrument, self._better_than_known(instrument))
                self._ended = MeasurementEnd(time.time())
            self._has_verdict, self._progress = True, ""
            if self._resumes and self._wanted.learns_on():
                self._learn_on(instrument)
        if self._resumes:
            self._time_again(instrument)

    def _carry_out(
        self,
        order: CalibrationOrder,
        instrument: Instrument,
        chosen: Callable[[Profile], Profile] = _all_of_it,
    ) -> None:
        """Carry out an order, and have the engine adopt what of it is ``chosen``."""
        began = time.monotonic()
        kept = Unfinished.of(order, instrument.fingerprint) if self._resumes else None
        known = (self._engine, kept, self._on_progress, self._partners, chosen)
        with _room_for(order.report_path) as write:
            write(msgspec.json.encode(survey_report(instrument, order, *known)))
        logger.info("%s in %.0f s", self._work_done, time.monotonic() - began)
        self._check()
        return_freed_memory()
        self._adopt()
        return_freed_memory()

    def _learn_on(self, instrument: Instrument) -> None:
        """Learn from more texts, and adopt presets that are better than those of the first few."""
        try:
            order = further_order(self._order, instrument.layout.elements_per_token)
            self._carry_out(order, instrument, self._worth_adopting(self._known(instrument)))
        except Interrupted:
            raise
        except Exception as error:  # no failure here takes the verdict back
            words = " ".join(str(error).split()) or type(error).__name__
            logger.warning("no more is learned of the model: %s", words, exc_info=True)

    def _time_again(self, instrument: Instrument) -> None:
        """Time the presets again until it is known how long they take on a quiet machine."""
        wait_s, longest_s = TIMED_AGAIN_S
        while self._wanted.times_again():
            self._progress = ""
            self._is_waiting = True
            self._closing.wait(wait_s)
            self._check()
            self._is_waiting = False
            wait_s = min(2 * wait_s, longest_s)
            self._progress = "timing again what was timed on a busy machine"
            try:
                self._time_once(instrument)
            except Interrupted:
                raise
            except Exception as error:  # no failure here takes the verdict back
                words = " ".join(str(error).split()) or type(error).__name__
                logger.warning("the model is not timed again now: %s", words, exc_info=True)

    def _time_once(self, instrument: Instrument) -> None:
        data = Path(self._order.data_path)
        with locked(data, instrument.fingerprint, self._wait_for_another):
            profile = self._known(instrument)
            rows = () if profile is None else self._timed(instrument, profile)
            if profile is not None and rows:
                save(replace(profile.in_memory(), rows=rows), data)
        if rows:
            self._adopt()

    def _timed(self, instrument: Instrument, profile: Profile) -> tuple[Quality, ...]:
        """Return all rows of the profile if some have better times now, else none."""
        current = [x for x in profile.rows if not x.preset.startswith(BEFORE)]
        names = [x.preset for x in current if is_disturbed(x)]
        again = timed_again(
            instrument,
            codecs_to_measure(instrument, names, profile),
            current,
            chunk_tokens=self._order.chunk_tokens,
            num_threads=self._order.num_threads,
        )
        if not again:
            return ()
        better = {(x.preset, x.context): x for x in again}
        return tuple(better.get((x.preset, x.context), x) for x in profile.rows)

    def _better_than_known(self, instrument: Instrument) -> Callable[[Profile], Profile]:
        """Return what keeps tables that more texts taught where a few find hardly better ones."""
        known = None if self._is_awaited else self._known(instrument)
        if known is None or not was_learned_on(known):
            return _all_of_it
        return self._worth_adopting(known)

    def _worth_adopting(self, before: Profile | None) -> Callable[[Profile], Profile]:
        return partial(worth_adopting, before=before, bound=Bound(kl=self._order.max_kl))

    def _known(self, instrument: Instrument) -> Profile | None:
        path = profile_path(Path(self._order.data_path), instrument.fingerprint)
        try:
            return load_profile(path, mapped=True)
        except (FileNotFoundError, Corrupt, Mismatch):
            return None

    @property
    def _work_done(self) -> str:
        return "learned from more texts" if self._has_verdict else "measured"

    @contextmanager
    def _alone(self, fingerprint: str) -> Iterator[bool]:
        """Wait until no other process measures this model; yields True if one did.

        The system frees the lock of a process that dies. Raises ``Interrupted``.
        """
        if not self._resumes:
            yield False
            return
        with locked(Path(self._order.data_path), fingerprint, self._wait_for_another):
            yield bool(self._progress)

    def _wait_for_another(self) -> None:
        self._progress = "waiting: another process measures this model"
        self._closing.wait(LOOK_EVERY_S)
        self._check()

    def _on_progress(self, progress: str) -> None:
        """Note how far it is; raises ``Interrupted`` if it is to end."""
        self._check()
        self._progress = f"{'learning on' if self._has_verdict else 'measuring'}: {progress}"
        return_freed_memory()  # the arrays of the step before are as large as a prompt's KV
        if time.monotonic() - self._logged_s >= LOG_EVERY_S:
            self._logged_s = time.monotonic()
            logger.info("%s", self._progress)

    def _check(self) -> None:
        if self._closing.is_set():
            raise Interrupted("the engine ends")
