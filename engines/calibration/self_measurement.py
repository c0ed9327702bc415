"""Measures the model that an engine serves, in the engine's own process and idle moments.

The work is done on a thread of the lowest priority. What needs the model goes through an
``Instrument`` that waits for idle moments of the engine; all else is arithmetic on arrays. When a
profile was written, the engine chooses its codecs again. If anything fails here, serving goes on
unchanged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from engines.calibration.instrument import Instrument
from engines.calibration.messages import CalibrationOrder
from engines.calibration.survey import CannotCalibrate, survey_report
from kvstore.codecs.profile import Profile
from kvstore.errors import UnknownCodec

logger = logging.getLogger(__name__)

LEAST_PRIORITY: Final = 19
CLOSE_S: Final = 10.0


class Interrupted(Exception):
    """The engine ends, or measuring was given up elsewhere; raised by instruments."""


class SelfMeasurement:
    """One measurement, begun at once. Its methods can be called from any thread."""

    def __init__(
        self,
        order: CalibrationOrder,
        open_instrument: Callable[[], Instrument],
        adopt: Callable[[], None],
        *,
        engine: str,
        agree: Callable[[Profile], Profile] = lambda profile: profile,
        give_up: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Begin to measure.

        Args:
            open_instrument: called on the measuring thread. May raise ``ValueError``: this model
                cannot be measured. The instrument's methods raise ``Interrupted`` once the engine
                ends.
            adopt: called on the measuring thread once the profile was written.
            engine: the name and version of the engine, for the report.
            agree: makes one verdict of what several ranks have found.
            give_up: called with the reason if this rank cannot go on.
        """
        self._order = order
        self._open_instrument = open_instrument
        self._adopt = adopt
        self._engine = engine
        self._agree = agree
        self._give_up = give_up
        self._thread = threading.Thread(target=self._run, name="thermocline-measure", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self, within_s: float = CLOSE_S) -> None:
        """Wait for the end of the thread, but not for ever: it is a daemon."""
        self._thread.join(within_s)

    def _run(self) -> None:
        _lower_priority()
        began = time.monotonic()
        logger.info("measuring what each codec costs this model; until then nothing is lost")
        try:
            survey_report(self._open_instrument(), self._order, self._engine, self._agree)
            logger.info("measured in %.0f s", time.monotonic() - began)
            self._adopt()
        except Interrupted:
            logger.info("measuring was interrupted; it begins again with the engine's next start")
        except (CannotCalibrate, UnknownCodec, OSError, ValueError) as error:
            logger.warning("the model is not measured: %s", " ".join(str(error).split()))
            self._give_up(str(error))
        except Exception as error:  # the edge of this thread: nothing here may end the service
            logger.exception("the model is not measured")
            self._give_up(f"{type(error).__name__}: {error}")


def _lower_priority() -> None:
    """Let everything else go first; threads that this one starts inherit it (on Linux)."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
