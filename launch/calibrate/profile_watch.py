"""Has an engine choose its codecs again when its model's profile has changed, by any writer.

Where nothing was measured, an engine begins with an exact codec and measures its model itself, in
its idle moments. Others may be quicker: ``thermocline calibrate``, another gateway's engine. If
anything fails here, serving goes on unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from engines.base import CodecReport, Engine, EngineError, EngineRefused
from engines.calibration.gate.profiles import profile_path
from launch.calibrate.profile_notes import write_note
from launch.calibrate.program import MEASURABLE
from launch.errors import LaunchError
from launch.settings.effective_settings import EffectiveSettings

log = logging.getLogger("thermocline.calibration")

LOOK_EVERY_S: Final = 2.0


class ProfileWatch:
    """Watches the engine and its model's profile. Belongs to one event loop."""

    def __init__(
        self, effective: EffectiveSettings, engine: Engine, *, look_every_s: float = LOOK_EVERY_S
    ) -> None:
        self._effective = effective
        self._engine = engine
        self._look_every_s = look_every_s
        self._seen: object = None  # the profile's file, as it was when the engine last looked
        self._remembered = ""

    async def run(self) -> None:
        """Watch until cancelled. Returns at once if this kind of engine cannot be measured."""
        while self._effective.engine_kind in MEASURABLE:
            try:
                if (codec := self._engine.codec) is not None and codec.fingerprint:
                    await self._look(codec)
            except (EngineError, LaunchError, OSError) as error:
                log.warning("what was measured of the model is not looked for: %s", error)
            except Exception:  # the edge of this task: nothing here may end the service
                log.exception("what was measured of the model is not looked for")
            await asyncio.sleep(self._look_every_s)

    async def _look(self, codec: CodecReport) -> None:
        if codec.fingerprint != self._remembered:
            self._remembered = codec.fingerprint
            await asyncio.to_thread(write_note, self._effective, codec.fingerprint)
            if not codec.unmeasured:
                self._seen = self._stamp(codec.fingerprint)
        stamp = self._stamp(codec.fingerprint)
        if stamp is not None and stamp != self._seen:
            with suppress(EngineRefused):  # its log says why; the next file may be better
                adopted = await self._engine.adopt()
                # An engine that measured it by itself has adopted it, and said so.
                if adopted.id != codec.id and not codec.progress:
                    log.info("sessions are packed from now on by %s: %s", adopted.name, adopted.why)
            self._seen = stamp

    def _stamp(self, fingerprint: str) -> object:
        """A value that changes when the profile's file does; None while there is no file."""
        with suppress(OSError):
            found = profile_path(self._effective.folders.data, fingerprint).stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return None
