"""Has an engine choose its codecs again when its model's profile has changed.

Where nothing was measured, an engine begins with an exact codec. mlx's then measures its model
itself, in its idle moments. When the model's profile has been written the engine is told to choose
again, whoever wrote it (``thermocline calibrate``, another gateway's engine).

For vLLM the calibration program runs as a child process meanwhile: at the lowest priority, at most
one for each data folder, in bounded memory and time, and never longer than this process. If
anything fails here, serving goes on unchanged.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from engines.base import CodecReport, Engine, EngineError, EngineRefused
from engines.calibration.gate.profiles import profile_path
from launch.calibrate.background_run import KEPT_FREE_BYTES, run_in_background
from launch.calibrate.orders import first_order
from launch.calibrate.profile_notes import write_note
from launch.calibrate.program import MEASURABLE, program
from launch.errors import LaunchError
from launch.machine.gpus import find_gpus
from launch.machine.memory import available_memory
from launch.settings.default_budgets import weights_bytes
from launch.settings.effective_settings import EffectiveSettings
from launch.settings.units import show_bytes

log = logging.getLogger("thermocline.calibration")

LOOK_EVERY_S: Final = 2.0
# Memory beside the weights: the texts' KV, what is learned of it, the engine itself.
WORK_BYTES: Final = 6 << 30
# More copies of the weights, where there is room: vLLM's gradients need a second model, and
# memory to read it.
MORE_COPIES: Final = 2
LOCK: Final = "calibrating.lock"
# Engines that are measured by a child process: none any more.
BY_PROGRAM: Final[tuple[str, ...]] = ()


class FirstCalibration:
    """Watches the engine and the profile's file; measures vLLM. Belongs to one event loop."""

    def __init__(
        self,
        effective: EffectiveSettings,
        engine: Engine,
        environ: Mapping[str, str],
        *,
        look_every_s: float = LOOK_EVERY_S,
        available: Callable[[], int] = available_memory,
    ) -> None:
        """``available``: bytes of memory that the machine can still give."""
        self._effective = effective
        self._engine = engine
        self._environ = environ
        self._look_every_s = look_every_s
        self._available = available
        self._profiles = effective.folders.data / "profiles"
        self._seen: object = None  # the profile's file, as it was when the engine last looked
        self._remembered = ""
        self._tried = False

    async def run(self) -> None:
        """Watch until cancelled. Returns at once if this kind of engine cannot be measured."""
        while self._effective.engine_kind in MEASURABLE:
            try:
                if (codec := self._engine.codec) is not None and codec.fingerprint:
                    await self._look(codec)
            except (EngineError, LaunchError, OSError) as error:
                log.warning("the model is not measured beside the service: %s", error)
            except Exception:  # the edge of this task: nothing here may end the service
                log.exception("the model is not measured")
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
        elif self._needs_a_program(codec):
            await self._calibrate()

    def _needs_a_program(self, codec: CodecReport) -> bool:
        """True if nobody has measured the model, and its engine cannot do it while it serves."""
        wanted = codec.unmeasured and self._effective.settings.store.calibrate
        return wanted and not self._tried and self._effective.engine_kind in BY_PROGRAM

    def _stamp(self, fingerprint: str) -> object:
        """A value that changes when the profile's file does; None while there is no file."""
        with suppress(OSError):
            found = profile_path(self._effective.folders.data, fingerprint).stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return None

    async def _calibrate(self) -> None:
        """Run the program, at most once in this process's life. It writes the profile's file."""
        with self._alone() as alone:
            if not alone:
                return
            self._tried = True
            order = await asyncio.to_thread(first_order, self._effective)
            weights = weights_bytes(Path(order.model_path), self._effective.widens) or 0
            if await asyncio.to_thread(find_gpus):
                raise LaunchError("its GPU may not hold it twice")
            most_bytes = granted_bytes(weights, self._available())
            order = msgspec.structs.replace(order, most_bytes=most_bytes)
            command, env = await asyncio.to_thread(program, self._effective, self._environ)
            log.info("measuring what each codec costs this model; until then nothing is lost")
            began = time.monotonic()
            code = await run_in_background(command, env, order, most_bytes)
            if code:
                raise LaunchError("the lines above say why")
            log.info("measured in %.0f s", time.monotonic() - began)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Lock the data folder's measurement; yields False if another process has the lock.

        The system frees the lock of a process that dies.
        """
        self._profiles.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._profiles / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def granted_bytes(weights: int, available: int) -> int:
    """Bytes of memory that a calibration may take, which loads the model a second time.

    Raises:
        LaunchError: there is too little.
    """
    least = weights + WORK_BYTES
    if least + KEPT_FREE_BYTES > available:
        raise LaunchError(
            f"that may take {show_bytes(least)}, and {show_bytes(available)} are available"
        )
    return min(least + MORE_COPIES * weights, available - KEPT_FREE_BYTES)
