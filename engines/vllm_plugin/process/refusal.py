"""Carries the sentence in which the plug-in refuses an engine to the process that started vLLM.

The plug-in runs in grandchildren of vLLM's first process. Their exceptions reach that process as
"engine core initialization failed", so the sentence goes through a file of the runtime folder.
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
    """The folder for a refusal; None if vLLM was started by hand, so that none is looked for."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else None


@contextmanager
def record_refusal(folder: Path | None, *kinds: type[Exception]) -> Iterator[None]:
    """Write down errors of these ``kinds`` for ``read_refusal``, and raise them again."""
    try:
        yield
    except kinds as error:
        if folder is not None:
            with suppress(OSError):  # what is raised says the same, only less well
                (folder / REFUSAL_FILE).write_text(" ".join(str(error).split()))
        raise


def read_refusal(folder: Path) -> str:
    """The sentence that was written down; "" if nothing was refused."""
    try:
        return (folder / REFUSAL_FILE).read_text()
    except OSError:
        return ""


def forget_refusal(folder: Path) -> None:
    """Remove what an earlier start has written down."""
    (folder / REFUSAL_FILE).unlink(missing_ok=True)
