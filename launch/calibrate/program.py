"""The calibration program of the chosen engine: its command line, its environment, and a run of it.

The program loads the model and measures it in a process of its own, with the engine's interpreter.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from engines.about_vllm.environment import import_path
from engines.calibration.messages import CalibrationOrder, CalibrationReport
from engines.runtime_folder import fresh_scratch
from launch.calibrate.orders import CalibrateOptions, order_of
from launch.calibrate.profile_notes import write_note
from launch.errors import LaunchError, UsageError
from launch.machine.blas import find_blas
from launch.machine.interpreters import CHILD_ENV
from launch.machine.private_folders import compile_environment, server_folder
from launch.settings.effective_settings import EffectiveSettings, require_installed

log = logging.getLogger("thermocline.launch")

# The module of each engine that has such a program.
_MODULES: Final = {"mlx": "engines.mlx_worker.calibrate", "vllm": "engines.vllm_plugin.calibrate"}
MEASURABLE: Final = tuple(_MODULES)


def calibrate(
    effective: EffectiveSettings, options: CalibrateOptions, environ: Mapping[str, str]
) -> CalibrationReport:
    """Measure the model in a process of its own, and wait for the report. Takes minutes.

    Raises:
        UsageError, LaunchError: it cannot be done; the message gives the remedy.
    """
    command, env = program(effective, environ)
    order = order_of(effective, options)
    with server_folder(effective.folders.cache, environ) as folder:
        env = {**env, "TMPDIR": str(fresh_scratch(folder))}
        report = msgspec.json.decode(_answer(command, order, env), type=CalibrationReport)
    write_note(effective, report.fingerprint)
    return report


def program(
    effective: EffectiveSettings, environ: Mapping[str, str]
) -> tuple[Sequence[str], Mapping[str, str]]:
    """The command that measures this model, and the whole environment to run it in.

    Raises:
        UsageError, LaunchError: the engine has none, or is not installed.
    """
    kind = effective.engine_kind
    if kind not in _MODULES:
        raise UsageError(f"engine {kind} cannot calibrate; use --set engine.kind=mlx, or vllm")
    require_installed(effective)
    compiled = compile_environment(effective.folders.cache, environ)
    if kind == "vllm":
        python = effective.settings.engine.vllm.python or sys.executable
        env: Mapping[str, str] = _path(environ)
    else:
        blas = find_blas(environ, effective.folders.cache)
        log.info("%s", blas.message)
        python, env = sys.executable, blas.env
    return [python, "-m", _MODULES[kind]], {**environ, **compiled, **CHILD_ENV, **env}


def _answer(command: Sequence[str], order: CalibrationOrder, env: Mapping[str, str]) -> bytes:
    """Run the program and return what it wrote.

    Its standard input stays open until then: the program ends when its input does. It has a session
    of its own, so that Ctrl-C ends only us, without a traceback out of the program's imports.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, env=env, start_new_session=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        answer = child.stdout.read()
    if child.returncode:
        raise LaunchError("the model could not be measured; the lines above say why")
    return answer


def _path(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The PYTHONPATH by which vLLM's interpreter finds our plug-in."""
    paths = [x for x in (import_path(), environ.get("PYTHONPATH", "")) if x]
    return {"PYTHONPATH": ":".join(paths)} if paths else {}
