"""Runs vLLM's HTTP server, and turns wrong settings into one sentence and an exit code.

vLLM reports a wrong setting by an exception of its first process, or of a grandchild, with some
hundred lines around it. A supervisor that sees only an ordinary exit code would start it again and
again. Failures that are certain to happen again end with ``WRONG_SETTINGS`` instead: a setting that
vLLM refuses before it starts anything (an unknown kind of model, a flag that it does not have), and
what the plug-in itself refuses (see ``refusal``). Any other failure may not happen the next time,
such as a GPU that is still full of the process before.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Final

from engines.config import WRONG_SETTINGS
from engines.vllm_plugin.process.refusal import FOLDER_VARIABLE, forget_refusal, read_refusal

SERVER: Final = "vllm.entrypoints.openai.api_server"
USAGE: Final = 2  # argparse's


def main() -> int:
    folder = Path(os.environ[FOLDER_VARIABLE])
    forget_refusal(folder)
    _write_prompts_plainly()
    try:
        # Like python -m: processes that vLLM spawns look for the main module by its name.
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code != USAGE:
            return _code(ended)
        _say("its command line is wrong, as the line above says; look at engine.vllm.args")
        return WRONG_SETTINGS
    except ValueError as error:  # of vLLM's configuration; pydantic's are of this kind, too
        _say(read_refusal(folder) or first_sentence(str(error)))
        return WRONG_SETTINGS
    except Exception:  # the edge of this process: only the plug-in's own refusals are looked at
        refusal = read_refusal(folder)
        if not refusal:
            raise
        _say(refusal)
        return WRONG_SETTINGS
    return 0


def _write_prompts_plainly() -> None:
    try:
        from engines.vllm_plugin.process.plain_renderer import register
    except ImportError:  # vLLM cannot be started, either, and says it better
        return
    register()


def first_sentence(text: str) -> str:
    """The reason for a refusal, taken out of pydantic's or vLLM's message.

    ``1 validation error for ModelConfig\\n  Value error, REASON [type=value_error, ...]``
    """
    _, marked, reason = text.partition("Value error, ")
    return " ".join((reason if marked else text).partition(" [type=")[0].split())


def _code(ended: SystemExit) -> int:
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def _say(reason: str) -> None:
    print(f"ERROR vLLM cannot serve with these settings: {reason}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
