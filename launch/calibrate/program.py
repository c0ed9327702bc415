"""Has an engine of its own measure a model: starts it, orders the measurement, waits, ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from engines.base import Engine, EngineError, EngineUnavailable
from engines.calibration.gate.profiles import make_folder
from engines.config import REPORT, CalibrationOrder, CalibrationReport
from engines.wire import MeasurementEnd, Welcome
from kvstore.codecs.names import EXACT
from launch.calibrate.orders import AFTER_CONTEXT, CalibrateOptions, order_of
from launch.calibrate.profile_notes import write_note
from launch.engine_start import compile_folders, engine_of
from launch.errors import LaunchError, UsageError
from launch.machine.private_folders import server_folder
from launch.model import find_model
from launch.settings.effective_settings import EffectiveSettings, require_installed
from launch.settings.fields import Value
from launch.settings.schema import laid_over

log = logging.getLogger("thermocline.launch")

MEASURABLE: Final = ("mlx", "vllm")
LOOK_EVERY_S: Final = 0.5
STORE_BYTES: Final = 16 << 20  # an engine without a cold store does not measure


def calibrate(
    effective: EffectiveSettings, options: CalibrateOptions, environ: Mapping[str, str]
) -> CalibrationReport:
    """Measure the model in an engine of its own, and wait for the report. Takes minutes.

    Raises:
        UsageError, LaunchError: it cannot be done; the message gives the remedy.
    """
    if effective.engine_kind not in MEASURABLE:
        raise UsageError(
            f"engine {effective.engine_kind} cannot calibrate; use --set engine.kind=mlx, or vllm"
        )
    require_installed(effective)
    compile_folders(effective, environ)  # before the sample model is written beside them
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    model.require_weights()
    order = order_of(effective, model, options)
    _check_data(effective.folders.data)
    own = _own_settings(effective, order)
    with server_folder(effective.folders.cache, environ) as folder:
        engine, blas = engine_of(own, model, own.settings.store, folder, environ)
        if blas is not None:
            log.info("%s", blas.message)
        asyncio.run(_measure(engine, order))
        written = (folder / REPORT).read_bytes()
    report = msgspec.json.decode(written, type=CalibrationReport)
    write_note(effective, report.fingerprint)
    return report


def _check_data(data: Path) -> None:
    """Check that profiles can be kept, before minutes are spent. Raises ``LaunchError``."""
    try:
        make_folder(data)
    except OSError as error:
        where = f"nothing can be kept in {data}; choose another data_dir"
        raise LaunchError(f"{where}: {error.strerror}") from error


def _own_settings(effective: EffectiveSettings, order: CalibrationOrder) -> EffectiveSettings:
    """The settings as of a server, for an engine that measures and stores no sessions."""
    settings = effective.settings
    changed: dict[str, object] = {
        # Lines of an engine that serves; the progress is logged here.
        "log_level": "warning" if settings.log_level == "info" else settings.log_level,
        "engine.hot_codec": "",
        "store.codec": EXACT,
        "store.disk_codec": "",
        "store.redis_codec": "",
        "store.calibrate": False,
        "store.ram_bytes": STORE_BYTES,
        "store.disk_bytes": 0,
        "store.disk_path": str(effective.folders.data),
        "store.redis_url": "",
    }
    if effective.engine_kind == "vllm":  # it refuses longer prompts
        longest = max(*order.contexts, order.window_tokens) + AFTER_CONTEXT
        changed["engine.max_context"] = longest
    layer = {name: Value(value, "calibrate") for name, value in changed.items()}
    return replace(effective, resolved=laid_over(effective.resolved, layer))


async def _measure(engine: Engine, order: CalibrationOrder) -> None:
    """Start the engine, have it carry out the order, and end it. Raises ``LaunchError``."""
    await engine.start()
    try:
        welcome = await _welcome(engine)
        if not welcome.can_measure:
            why = welcome.hibernation_reason or welcome.codec.why
            raise LaunchError(f"the engine cannot measure this model: {why}")
        await engine.measure(order)
        end = await _end(engine, welcome)
        if end.error:
            raise LaunchError(end.error)
    except EngineError as error:
        raise LaunchError(f"the model could not be measured: {error}") from error
    finally:
        await engine.stop(0.0)


async def _welcome(engine: Engine) -> Welcome:
    """Wait until the engine is ready. Raises ``LaunchError``: it will never be."""
    while (welcome := engine.welcome) is None:
        if engine.gave_up:
            raise LaunchError("the model could not be measured; the lines above say why")
        await asyncio.sleep(LOOK_EVERY_S)
    return welcome


async def _end(engine: Engine, welcome: Welcome) -> MeasurementEnd:
    """Wait for the end of the measurement. Raises ``LaunchError``: the engine ended before it.

    A connection may be lost and made anew while the engine goes on. An engine that was started
    again does not measure.
    """
    shown = ""
    while not engine.gave_up:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            codec = (await engine.stats()).codec
        except EngineUnavailable:
            continue
        if codec is None:
            continue
        if codec.ended is not None and not codec.progress:
            return codec.ended
        if codec.progress not in ("", shown):
            shown = codec.progress
            log.info("%s", shown)
        if not codec.progress and engine.welcome is not welcome:
            break
    raise LaunchError("the engine ended while it measured; the lines above say why")
