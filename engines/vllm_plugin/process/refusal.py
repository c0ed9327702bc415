"""Passes the plug-in's reason to refuse an engine to the process that started vLLM.

The plug-in runs in grandchildren of vLLM's first process. Their exceptions reach that process as
"engine core initialization failed", so the reason is written to a file in the runtime folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "THERMOCLINE_RUNTIME_DIR"
REFUSAL_FILE: Final = "refusal"


def runtime_folder() -> Path | None:
    """The folder for a refusal; None if vLLM was started by hand, when no process reads one."""
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
    """The recorded sentence; "" if no engine was refused."""
    try:
        return (folder / REFUSAL_FILE).read_text()
    except OSError:
        return ""


def forget_refusal(folder: Path) -> None:
    """Remove the refusal of an earlier start."""
    (folder / REFUSAL_FILE).unlink(missing_ok=True)
