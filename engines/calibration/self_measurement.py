"""Measures the model that an engine serves, in the engine's own process and idle moments.

The work is done on a thread of the lowest priority. It uses the model only through an
``Instrument``, which waits for idle moments of the engine; all else is arithmetic on arrays. Each
stage writes the profile and has the engine choose its codecs again: a first verdict comes early,
and is replaced as more is learned. If anything fails here, the engine serves as before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import msgspec

from engines.calibration.calibrate import Calibration, CannotCalibrate, codecs_to_measure
from engines.calibration.gate.profiles import load, locked, make_folder, save
from engines.calibration.gate.rules import is_doubtful
from engines.calibration.instrument import Instrument
from engines.calibration.instrument import Interrupted as Interrupted
from engines.calibration.measuring.measure import timed_again
from engines.calibration.orders import early_order, further_order
from engines.calibration.scratch import (
    FewThreads,
    large_arrays_apart,
    return_freed_memory,
    room_on_disk,
)
from engines.config import CalibrationOrder, CalibrationReport
from engines.wire import CodecReport, MeasurementEnd
from kvstore.codecs.names import OWN, first_part
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality, short_row
from kvstore.errors import UnknownCodec
from kvstore.workers import lower_priority

logger = logging.getLogger(__name__)

CLOSE_S: Final = 2.0
KEPT_BYTES: Final = 4 << 30
LOG_EVERY_S: Final = 60.0  # between log lines; ``progress`` is always the latest
LOOK_EVERY_S: Final = 2.0
# Until the next attempt to time a model on a quiet machine; doubled each time, up to the second.
TIMED_AGAIN_S: Final = (60.0, 3600.0)


class OpenQuestions(Protocol):
    """The questions about its model that an engine has open; read on the measuring thread."""

    @property
    def unmeasured(self) -> bool:
        """True if there is no verdict yet, or only one by few texts."""

    @property
    def learns_on(self) -> bool:
        """True if more is to be learned once there is a verdict."""

    @property
    def times_again(self) -> bool:
        """True if the verdict depends on times that other work disturbed."""


class Partners(Protocol):
    """The other ranks that measure the same model at the same time."""

    def agree(self, profile: Profile) -> Profile:
        """Return the profile with the joint figures of all ranks, for which this waits.

        Raises:
            Interrupted: the engine ends.
            RuntimeError: a rank has given up.
        """

    def give_up(self, reason: str) -> None:
        """Inform the other ranks that this one has stopped measuring."""


class SelfMeasurement:
    """One measurement, which begins at once. Its methods can be called from any thread.

    Without ``stages`` it carries out the order as it is. With ``stages`` it measures a model for
    serving: an early verdict comes before the order, and open questions are answered after it.
    Presets then do not learn again, and only one process measures a model at a time.
    """

    def __init__(
        self,
        order: CalibrationOrder,
        open_instrument: Callable[[], Instrument],
        adopt: Callable[[], None],
        *,
        engine: str,
        stages: bool = False,
        open_questions: OpenQuestions | None = None,
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
            open_questions: decide which stages are needed; None = carry out the order in any case.
            partners: the other ranks, if the engine has several.
        """
        self._order = order
        self._data = Path(order.data_path)
        self._open_instrument = open_instrument
        self._adopt = adopt
        self._engine = engine
        self._stages = stages
        self._open = open_questions
        self._has_verdict = False
        self._partners = partners
        self._progress = ""
        self._found: tuple[Quality, ...] = ()
        self._ended: MeasurementEnd | None = None
        self._logged_s = float("-inf")
        self._closing = threading.Event()
        self._is_waiting = False
        self._blas = FewThreads()
        self._thread = threading.Thread(target=self._run, name="thermocline-measure", daemon=True)
        self._thread.start()

    @property
    def _is_awaited(self) -> bool:
        """True if a command waits for the report, for which it has started the engine."""
        return bool(self._order.report_path)

    @property
    def is_running(self) -> bool:
        """True while it measures; False if it has ended or only waits for a quiet machine."""
        return self._thread.is_alive() and not self._is_waiting

    @property
    def has_verdict(self) -> bool:
        """True once there is a verdict, even if more will be learned."""
        return self._has_verdict

    def with_progress(self, report: CodecReport) -> CodecReport:
        """Return ``report`` with this measurement's progress, rows and end."""
        news = {"progress": self._progress, "found": self._found, "ended": self._ended}
        return msgspec.structs.replace(report, **news)

    def close(self) -> None:
        """Stop at the next opportunity. The instrument must raise ``Interrupted`` as well."""
        self._closing.set()

    def join(self, within_s: float = CLOSE_S) -> None:
        """Wait up to ``within_s`` for the end of the thread, which is a daemon."""
        self._thread.join(within_s)

    def _run(self) -> None:
        lower_priority()
        try:
            with self._blas, large_arrays_apart():
                self._measure()
            self._ended = MeasurementEnd(time.time())
        except Interrupted:
            logger.info("measuring was interrupted; it begins again with the engine's next start")
        except (CannotCalibrate, UnknownCodec, OSError, ValueError) as error:
            words = " ".join(str(error).split())
            logger.warning("the model is not measured: %s", words)
            self._give_up(words)
        except Exception as error:  # top level of this thread: serving must continue
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
        make_folder(self._data)
        alone = locked(self._data, instrument.fingerprint, self._wait_for_another)
        with alone if self._stages else nullcontext():
            if self._progress:  # after waiting: the other process may have written the profile
                self._adopt()
            how = (self._on_progress, self._data / "profiles", self._room)
            with Calibration(instrument, *how) as calibration:
                if self._open is None or self._open.unmeasured:
                    self._first_verdict(calibration, instrument)
                    self._ended = MeasurementEnd(time.time())
                self._has_verdict, self._progress = True, ""
                if self._stages and self._open is not None and self._open.learns_on:
                    order = further_order(self._order, instrument.layout.elements_per_token)
                    with self._keeping_verdict("no more is learned of the model"):
                        self._carry_out(calibration, order, "learned from more texts")
        if self._stages:
            self._time_again(instrument)

    @property
    def _room(self) -> int:
        """Bytes for the exact cache's log-probabilities; equal on all ranks, which run in step."""
        return KEPT_BYTES if self._partners is not None else room_on_disk(self._data, KEPT_BYTES)

    def _first_verdict(self, calibration: Calibration, instrument: Instrument) -> None:
        known = load(self._data, instrument.fingerprint) if self._stages else None
        logger.info(
            "measuring what each codec costs this model, in idle moments; %s",
            "until then sessions are packed as an earlier verdict allows"
            if known is not None
            else "until then sessions are stored exactly. A restart before the first verdict begins"
            " anew",
        )
        if self._stages and known is None:
            self._carry_out(calibration, early_order(self._order), "a first verdict")
        self._carry_out(calibration, self._order, "measured", known)

    def _carry_out(
        self,
        calibration: Calibration,
        order: CalibrationOrder,
        work: str,
        known: Profile | None = None,
    ) -> None:
        """Carry out an order, and have the engine adopt the result.

        If the order ends early, or a command waits for the report, the engine adopts the result
        after every preset. An early order has no result if its few texts do not decide.
        """
        began, profile = time.monotonic(), None
        publishes_each = self._partners is None and (order.ends_early or self._is_awaited)
        for profile in calibration.profiles(order, known):
            self._found = tuple(map(short_row, profile.rows))
            if publishes_each:
                self._publish(profile)
        if profile is None:
            logger.info("a few texts do not decide yet")
            return
        if not publishes_each:
            self._publish(profile if self._partners is None else self._partners.agree(profile))
        logger.info("%s in %.0f s", work, time.monotonic() - began)

    def _publish(self, profile: Profile) -> None:
        """Save a profile, write a command's report if wanted, and have the engine adopt it."""
        self._found = tuple(map(short_row, profile.rows))
        try:
            path = str(save(profile, self._data))
        except OSError as error:  # a full disk, perhaps: the report is still written
            logger.error("the profile cannot be saved: %s", error)
            path = ""
        if self._order.report_path:
            report = CalibrationReport(
                fingerprint=profile.fingerprint,
                engine=self._engine,
                dtype=profile.layout.dtype,
                rows=profile.rows,
                profile=path,
            )
            Path(self._order.report_path).write_bytes(msgspec.json.encode(report))
        self._check()
        self._adopt()
        self._has_verdict = True
        return_freed_memory()

    @contextmanager
    def _keeping_verdict(self, failed: str) -> Iterator[None]:
        """Log a failure of the block, after which the present verdict stays valid."""
        try:
            yield
        except Interrupted:
            raise
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            logger.warning("%s: %s", failed, words, exc_info=True)

    def _time_again(self, instrument: Instrument) -> None:
        """Time the presets again until all were timed on a quiet machine."""
        wait_s, longest_s = TIMED_AGAIN_S
        while self._open is not None and self._open.times_again:
            self._progress = ""
            self._is_waiting = True
            self._closing.wait(wait_s)
            self._check()
            self._is_waiting = False
            wait_s = min(2 * wait_s, longest_s)
            self._progress = "timing codecs again, after times from a busy or another machine"
            with self._keeping_verdict("the model is not timed again now"):
                self._time_once(instrument)

    def _time_once(self, instrument: Instrument) -> None:
        with locked(self._data, instrument.fingerprint, self._wait_for_another):
            profile = load(self._data, instrument.fingerprint)
            if profile is None:
                return
            own = [x for x in profile.rows if first_part(x.preset) in OWN]
            doubtful = [x.preset for x in own if is_doubtful(x)]
            codecs = codecs_to_measure(instrument, doubtful, profile)
            num_threads = self._order.num_threads
            again = timed_again(instrument, codecs, profile.rows, num_threads=num_threads)
            if again:
                save(replace(profile, rows=tuple(again)), self._data)
        if again:
            self._adopt()

    def _wait_for_another(self) -> None:
        self._progress = "waiting: another process measures this model"
        self._closing.wait(LOOK_EVERY_S)
        self._check()

    def _on_progress(self, progress: str) -> None:
        """Record the progress; raise ``Interrupted`` if the engine ends."""
        self._check()
        if self._is_awaited:  # by a command: no user is served
            self._blas.take_idle_cores()
        learns_on = self._has_verdict and not self._is_awaited
        self._progress = f"{'measuring more' if learns_on else 'measuring'}: {progress}"
        return_freed_memory()  # the arrays of the step before are as large as a prompt's KV
        if time.monotonic() - self._logged_s >= LOG_EVERY_S:
            self._logged_s = time.monotonic()
            logger.info("%s", self._progress)

    def _check(self) -> None:
        if self._closing.is_set():
            raise Interrupted("the engine ends")
