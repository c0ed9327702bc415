"""vLLM's HTTP server, run so that settings it can never follow end in one sentence.

vLLM tells of a wrong setting by an exception of its first process, or of a grandchild, with some
hundred lines around it. A supervisor that sees only an exit code would start it again and again.
What is certain to happen again ends with ``WRONG_SETTINGS`` instead: a setting that vLLM refuses
before it starts anything (an unknown kind of model, a flag that it does not have), and what the
plug-in itself refuses (see ``refusal``). Anything else, such as a GPU that is still full of the
process before, may pass.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Final

from engines.config import WRONG_SETTINGS
from engines.vllm_plugin.refusal import FOLDER_VARIABLE, forget_refusal, read_refusal

SERVER: Final = "vllm.entrypoints.openai.api_server"
USAGE: Final = 2  # argparse's


def main() -> int:
    folder = Path(os.environ[FOLDER_VARIABLE])
    forget_refusal(folder)
    try:
        # As python -m does it: processes that vLLM spawns look for the main module by its name.
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


def first_sentence(text: str) -> str:
    """What is wrong, out of pydantic's or vLLM's words.

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
