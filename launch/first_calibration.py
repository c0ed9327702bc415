"""The measurement of a model at its first start, beside the engine that serves it.

The engine begins with an exact codec where nothing was measured. Meanwhile the calibration program
runs as a child: at the lowest priority, one for each data folder, in bounded memory and time, and
never longer than this process. When it has written the model's profile the engine is told to look
again; so it is, too, when somebody else wrote one (``thermocline calibrate``, another gateway).
Whatever fails here, serving goes on as it is.
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
from engines.calibration.profiles import profile_path
from launch.budgets import weights_bytes
from launch.calibrate import first_order, program
from launch.calibration_child import KEPT_FREE_BYTES, run_child
from launch.effective import Effective
from launch.errors import LaunchError
from launch.gpus import find_gpus
from launch.machine import available_memory
from launch.measured import MEASURABLE, remember
from launch.units import show_bytes

log = logging.getLogger("thermocline.calibration")

LOOK_EVERY_S: Final = 2.0
# What it may take beside the weights: the texts' KV, what is learned of it, the engine itself.
WORK_BYTES: Final = {"mlx": 3 << 30, "vllm": 6 << 30}
# Of the weights, where there is room for more: for gradients on vLLM, as read and as kept.
MORE_COPIES: Final = {"mlx": 0, "vllm": 2}
LOCK: Final = "calibrating.lock"


class FirstCalibration:
    """Belongs to one event loop."""

    def __init__(
        self,
        effective: Effective,
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
        """Until cancelled. Returns at once where the model is not ours to load."""
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
            await asyncio.to_thread(remember, self._effective, codec.fingerprint)
            if not codec.unmeasured:
                self._seen = self._stamp(codec.fingerprint)
        stamp = self._stamp(codec.fingerprint)
        if stamp is not None and stamp != self._seen:
            with suppress(EngineRefused):  # its log says why; the next file may be better
                adopted = await self._engine.adopt()
                log.info("sessions are packed from now on by %s: %s", adopted.name, adopted.why)
            self._seen = stamp
        elif codec.unmeasured and self._effective.settings.store.calibrate and not self._tried:
            await self._calibrate()

    def _stamp(self, fingerprint: str) -> object:
        """Another one for every content; None while there is no file."""
        with suppress(OSError):
            found = profile_path(self._effective.folders.data, fingerprint).stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return None

    async def _calibrate(self) -> None:
        """Once in this process's life. What it finds is in the profile, and seen there."""
        with self._alone() as alone:
            if not alone:
                return
            self._tried = True
            order = await asyncio.to_thread(first_order, self._effective)
            weights = weights_bytes(Path(order.model_path), self._effective.widens) or 0
            kind = self._effective.engine_kind
            gpus = await asyncio.to_thread(find_gpus) if kind == "vllm" else []
            if gpus:
                raise LaunchError("its GPU may not hold it twice")
            most_bytes = granted_bytes(kind, weights, self._available())
            order = msgspec.structs.replace(order, most_bytes=most_bytes)
            command, env = await asyncio.to_thread(program, self._effective, self._environ)
            log.info("measuring what each codec costs this model; until then nothing is lost")
            began = time.monotonic()
            code = await run_child(command, env, order, most_bytes)
            if code:
                raise LaunchError("the lines above say why")
            log.info("measured in %.0f s", time.monotonic() - began)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether nobody else measures with this data folder; the system frees the lock of the
        dead."""
        self._profiles.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._profiles / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def granted_bytes(kind: str, weights: int, available: int) -> int:
    """Memory that a calibration may take: it loads the model a second time.

    Raises:
        LaunchError: there is too little.
    """
    least = weights + WORK_BYTES[kind]
    if least + KEPT_FREE_BYTES > available:
        raise LaunchError(
            f"that may take {show_bytes(least)}, and {show_bytes(available)} are available"
        )
    return min(least + MORE_COPIES[kind] * weights, available - KEPT_FREE_BYTES)
