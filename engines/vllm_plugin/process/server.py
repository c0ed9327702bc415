"""Runs vLLM's HTTP server, and turns wrong settings into one sentence and an exit code.

vLLM reports a wrong setting by an exception in its first process or a grandchild, amid some hundred
lines of output. A supervisor that sees only an ordinary exit code would start it again and again.
So failures that are certain to happen again end with the exit code ``WRONG_SETTINGS``: a setting
that vLLM refuses before it starts any process (an unknown kind of model, an unknown flag), and an
engine that the plug-in itself refuses. Any other failure may not happen the next time, for example
if the previous process still held the GPU's memory.

The plug-in runs in grandchildren of vLLM's first process. Their exceptions reach that process as
"engine core initialization failed", so the plug-in writes its reason to refuse an engine to a file
in the runtime folder.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from engines.config import WRONG_SETTINGS

FOLDER_VARIABLE: Final = "THERMOCLINE_RUNTIME_DIR"
REFUSAL_FILE: Final = "refusal"
SERVER: Final = "vllm.entrypoints.openai.api_server"
USAGE: Final = 2  # argparse's exit code for a wrong command line


def refusal_folder() -> Path | None:
    """Return the folder for a refusal; None if vLLM was started by hand, so no process reads it."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else None


@contextmanager
def record_refusal(folder: Path | None, *kinds: type[Exception]) -> Iterator[None]:
    """Write errors of these ``kinds`` to the file for ``read_refusal``, and raise them again."""
    try:
        yield
    except kinds as error:
        if folder is not None:
            with suppress(OSError):  # the raised error gives the same reason, less clearly
                (folder / REFUSAL_FILE).write_text(" ".join(str(error).split()))
        raise


def read_refusal(folder: Path) -> str:
    """Return the recorded reason; "" if no engine was refused."""
    try:
        return (folder / REFUSAL_FILE).read_text()
    except OSError:
        return ""


def forget_refusal(folder: Path) -> None:
    """Remove the refusal of an earlier start."""
    (folder / REFUSAL_FILE).unlink(missing_ok=True)


def main() -> int:
    folder = Path(os.environ[FOLDER_VARIABLE])
    forget_refusal(folder)
    _register_renderers()
    try:
        # Like python -m: processes that vLLM spawns find the main module by its name.
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code != USAGE:
            return _code(ended)
        _print_error("its command line is wrong, as the line above says; look at engine.vllm.args")
        return WRONG_SETTINGS
    except ValueError as error:  # from vLLM's configuration; pydantic's errors are ValueErrors, too
        _print_error(read_refusal(folder) or first_sentence(str(error)))
        return WRONG_SETTINGS
    except Exception:  # top level of this process: only the plug-in's own refusals are handled
        refusal = read_refusal(folder)
        if not refusal:
            raise
        _print_error(refusal)
        return WRONG_SETTINGS
    return 0


def _register_renderers() -> None:
    try:
        from engines.vllm_plugin.process.plain_renderer import register
    except ImportError:  # vLLM will fail to start in the same way, with a better message
        return
    register()


def first_sentence(text: str) -> str:
    """Return the reason for a refusal in pydantic's or vLLM's message, which has this form:

    ``1 validation error for ModelConfig\\n  Value error, REASON [type=value_error, ...]``
    """
    _, marked, reason = text.partition("Value error, ")
    return " ".join((reason if marked else text).partition(" [type=")[0].split())


def _code(ended: SystemExit) -> int:
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def _print_error(reason: str) -> None:
    print(f"ERROR vLLM cannot serve with these settings: {reason}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
