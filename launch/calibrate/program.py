"""Measures a model in an engine started for that, and lets serving engines adopt new profiles.

If its model was not measured yet, a serving engine begins with an exact codec and measures the
model in idle moments. ``thermocline calibrate`` or another gateway's engine may finish before it:
``ProfileWatch`` then lets the engine adopt their profile. If that fails, serving goes on unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from engines.base import CodecReport, Engine, EngineError, EngineRefused, EngineUnavailable
from engines.calibration.gate.profiles import make_folder, profile_path
from engines.calibration.orders import FIRST_CHAINS, FIRST_WINDOWS, PROBED
from engines.config import REPORT, CalibrationOrder, CalibrationReport
from engines.kv_budget import stated_context
from engines.wire import MeasurementEnd, Welcome
from kvstore.codecs.names import CODECS, EXACT, FLOOR, OWN, split_names
from kvstore.codecs.presets import canonical_name, check_name
from kvstore.codecs.quality import Quality
from kvstore.errors import UnknownCodec
from kvstore.workers import restoring_threads
from launch.calibrate.profile_notes import write_note
from launch.engine_start import compile_folders, engine_of
from launch.errors import LaunchError, UsageError
from launch.machine.folders import server_folder
from launch.model.find import Model, find_model
from launch.settings.effective_settings import EffectiveSettings, require_installed
from launch.settings.schema import laid_over
from launch.settings.sources import Value

log = logging.getLogger("thermocline.launch")

OnRows: TypeAlias = Callable[[Sequence[Quality]], None]
LOOK_EVERY_S: Final = 0.5
STORE_BYTES: Final = 16 << 20  # small, but not 0: an engine without a cold store does not measure
watch_log = logging.getLogger("thermocline.calibration")
WATCH_EVERY_S: Final = 2.0
USUAL_CONTEXTS = "2048,6144"
USUAL_WINDOW: Final = 512  # tokens of a text to learn from
AFTER_CONTEXT: Final = 512  # tokens after the context: the scored ones, or a needle's question
MOST_CONTEXT: Final = 1 << 20  # tokens that an order may ask for
SNIFFED_BYTES: Final = 1 << 16  # of a file, that are searched for NUL bytes
# Names that stand for several presets.
GROUPS: Final[Mapping[str, Iterable[str]]] = {"ours": OWN, "usual": FLOOR, "all": CODECS}
# Our presets, and codecs that are common elsewhere for comparison.
USUAL_PRESETS: Final = "ours,usual"


def calibrate(
    effective: EffectiveSettings,
    options: CalibrateOptions,
    environ: Mapping[str, str],
    on_rows: OnRows = lambda rows: None,
) -> CalibrationReport:
    """Start an engine, let it measure the model, and return the report. Takes minutes.

    Args:
        on_rows: called repeatedly with all rows so far.

    Raises:
        UsageError, LaunchError: the model cannot be measured; the message gives the remedy.
    """
    if not effective.is_ours:
        raise UsageError(
            f"engine {effective.engine_kind} cannot calibrate; use --set engine.kind=mlx, or vllm"
        )
    require_installed(effective)
    compile_folders(effective, environ)  # checked before the sample model is written there
    model = find_model(effective.settings.engine.model, effective.folders.cache)
    model.require_weights()
    order = order_of(effective, model, options)
    data = effective.folders.data
    try:  # find out that the profile cannot be stored before minutes are spent
        make_folder(data)
    except OSError as error:
        where = f"nothing can be kept in {data}; choose another data_dir"
        raise LaunchError(f"{where}: {error.strerror}") from error
    own = _own_settings(effective, order)
    with server_folder(effective.folders.cache, environ) as folder:
        engine, blas = engine_of(own, model, own.settings.store, folder, environ)
        if blas is not None:
            log.info("%s", blas.message)
        asyncio.run(_measure(engine, order, on_rows))
        written = (folder / REPORT).read_bytes()
    report = msgspec.json.decode(written, type=CalibrationReport)
    write_note(effective, report.fingerprint)
    return report


def _own_settings(effective: EffectiveSettings, order: CalibrationOrder) -> EffectiveSettings:
    """Return the settings of an engine that only measures, and stores no sessions."""
    settings = effective.settings
    changed: dict[str, object] = {
        # The engine's own lines are about serving; this process logs the progress.
        "log_level": "warning" if settings.log_level == "info" else settings.log_level,
        "engine.hot_codec": "",
        "store.codec": EXACT,
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


async def _measure(engine: Engine, order: CalibrationOrder, on_rows: OnRows) -> None:
    """Start the engine, wait for it to carry out the order, and stop it. Raises ``LaunchError``."""
    await engine.start()
    try:
        welcome = await _welcome(engine)
        if not welcome.can_measure:
            why = welcome.hibernation_reason or welcome.codec.why
            raise LaunchError(f"the engine cannot measure this model: {why}")
        await engine.measure(order)
        end = await _end(engine, welcome, on_rows)
        if end.error:
            raise LaunchError(end.error)
    except EngineError as error:
        raise LaunchError(f"the model could not be measured: {error}") from error
    finally:
        await engine.stop(0.0)


async def _welcome(engine: Engine) -> Welcome:
    """Wait until the engine is ready. Raises ``LaunchError`` if it gives up."""
    while (welcome := engine.welcome) is None:
        if engine.gave_up:
            raise LaunchError("the model could not be measured; the lines above say why")
        await asyncio.sleep(LOOK_EVERY_S)
    return welcome


async def _end(engine: Engine, welcome: Welcome, on_rows: OnRows) -> MeasurementEnd:
    """Wait for the end of the measurement. Raises ``LaunchError`` if the engine ends before it.

    A lost connection is made again while the engine goes on measuring. A restarted engine, which
    sends a new ``Welcome``, does not go on.
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
        on_rows(codec.found)
        if codec.ended is not None and not codec.progress:
            return codec.ended
        if codec.progress not in ("", shown):
            shown = codec.progress
            log.info("%s", shown)
        if not codec.progress and engine.welcome is not welcome:
            break
    raise LaunchError("the engine ended while it measured; the lines above say why")


class ProfileWatch:
    """Lets a serving engine adopt a profile that another process has written or changed.

    Belongs to one event loop.
    """

    def __init__(self, effective: EffectiveSettings, engine: Engine) -> None:
        self._effective = effective
        self._engine = engine
        self._seen: object = None  # the stamp of the profile that the engine has adopted or refused
        self._noted_fingerprint = ""

    async def run(self) -> None:
        """Watch until cancelled. Returns at once if this kind of engine cannot be measured."""
        while self._effective.is_ours:
            try:
                if (codec := self._engine.codec) is not None and codec.fingerprint:
                    await self._look(codec)
            except (EngineError, LaunchError, OSError) as error:
                watch_log.warning("profiles of other processes are not looked for: %s", error)
            except Exception:  # the edge of this task: nothing here may end the service
                watch_log.exception("profiles of other processes are not looked for")
            await asyncio.sleep(WATCH_EVERY_S)

    async def _look(self, codec: CodecReport) -> None:
        if codec.fingerprint != self._noted_fingerprint:
            self._noted_fingerprint = codec.fingerprint
            await asyncio.to_thread(write_note, self._effective, codec.fingerprint)
            if not codec.unmeasured:
                self._seen = self._stamp(codec.fingerprint)
        stamp = self._stamp(codec.fingerprint)
        if stamp is not None and stamp != self._seen:
            with suppress(EngineRefused):  # the engine logs why; the next profile may be accepted
                adopted = await self._engine.adopt()
                # If the engine measured the model itself, it has already logged the new codec.
                if adopted.id != codec.id and not codec.progress:
                    watch_log.info(
                        "sessions are packed from now on by %s: %s", adopted.name, adopted.why
                    )
            self._seen = stamp

    def _stamp(self, fingerprint: str) -> object:
        """Return a value that changes with the profile's file; None if there is no file."""
        with suppress(OSError):
            found = profile_path(self._effective.folders.data, fingerprint).stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return None


@dataclass(frozen=True)
class CalibrateOptions:
    """The options of ``thermocline calibrate``, as the user wrote them."""

    texts: Sequence[Path]
    eval_texts: Sequence[Path]
    presets: str | None  # names and groups, separated by commas; None = ``USUAL_PRESETS``
    contexts: str | None  # None = those of ``USUAL_CONTEXTS`` that the model can take


def order_of(
    effective: EffectiveSettings, model: Model, options: CalibrateOptions
) -> CalibrationOrder:
    """Return the calibration order for this model and these options.

    Raises:
        UsageError, LaunchError: the model cannot be measured like this; the message gives the
            remedy.
    """
    for path in (*options.texts, *options.eval_texts):
        _check_text(path)
    if both := {x.resolve() for x in options.texts} & {x.resolve() for x in options.eval_texts}:
        raise UsageError(f"{both.pop()} cannot serve both --text and --eval-text; use another file")
    longest, window = stated_context(model.config()), USUAL_WINDOW
    if longest is not None:  # a short model learns from shorter texts
        window = max(128, min(window, longest - AFTER_CONTEXT))
    return CalibrationOrder(
        presets=presets_of(options.presets),
        contexts=_contexts(options.contexts, longest),
        num_windows=FIRST_WINDOWS,
        window_tokens=window,
        probed_share=PROBED,
        num_chains=FIRST_CHAINS,
        fit_texts=tuple(dict.fromkeys(str(x.resolve()) for x in options.texts)),
        eval_texts=tuple(dict.fromkeys(str(x.resolve()) for x in options.eval_texts)),
        num_threads=restoring_threads(effective.settings.store.num_threads),
    )


def _check_text(path: Path) -> None:
    """Raise ``UsageError`` for a file that is missing, empty or not text."""
    if not path.is_file():  # a pipe is refused: reading it here would leave the engine nothing
        raise UsageError(f"{path} is no regular file")
    try:
        with path.open("rb") as file:
            begin = file.read(SNIFFED_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not begin.strip():
        raise UsageError(f"{path} is empty")
    if b"\0" in begin:
        raise UsageError(f"{path} is not text; give a file in UTF-8")


def presets_of(names: str | None) -> tuple[str, ...]:
    """Return the presets of a list of names and groups, each once. Raises ``UsageError``."""
    wanted = split_names(USUAL_PRESETS if names is None else names)
    each = dict.fromkeys(preset for name in wanted for preset in GROUPS.get(name, (name,)))
    try:
        for name in each:
            check_name(name)
        return tuple(dict.fromkeys(map(canonical_name, each)))
    except UnknownCodec as error:
        raise UsageError(f"--presets: {error}") from error


def _contexts(wished: str | None, longest: int | None) -> tuple[int, ...]:
    """Return the context lengths to measure; ``longest`` is the model's limit, None if unknown.

    Raises ``UsageError`` if ``wished`` is malformed or too long for the model.
    """
    text = USUAL_CONTEXTS if wished is None else wished
    try:
        contexts = tuple(dict.fromkeys(int(x) for x in text.split(",")))
    except ValueError:
        raise UsageError(f"--contexts {text}: write numbers of tokens, such as 2048,6144") from None
    if max(contexts) > MOST_CONTEXT:
        raise UsageError(f"--contexts {text}: at most {MOST_CONTEXT} tokens")
    if min(contexts) < 128:
        raise UsageError(f"--contexts {text}: at least 128 tokens")
    most = max(contexts) if longest is None else longest - AFTER_CONTEXT
    if most < 128:
        raise UsageError(
            f"the model's context has {longest} tokens; measuring needs {128 + AFTER_CONTEXT}"
        )
    if wished is None:
        return tuple(x for x in contexts if x <= most) or (most // 128 * 128,)
    if max(contexts) > most:
        raise UsageError(
            f"--contexts {text}: the model's context has {longest} tokens, of which {AFTER_CONTEXT}"
            f" are needed after the measured ones; measure at most {most}"
        )
    return contexts
