"""What the plug-in refuses to work with, on its way to whoever started vLLM.

The plug-in runs in vLLM's grandchildren. Their exceptions reach the first process as "engine core
initialization failed", so the sentence goes into a file of the runtime folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "THERMOCLINE_RUNTIME_DIR"
REFUSAL_FILE: Final = "refusal"


def given_folder() -> Path | None:
    """Where a refusal is looked for. None = vLLM was started by hand: nobody looks."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else None


@contextmanager
def told_in(folder: Path | None, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these ``kinds`` are written down for ``read_refusal`` on their way up."""
    try:
        yield
    except kinds as error:
        if folder is not None:
            with suppress(OSError):  # what is raised says the same, only less well
                (folder / REFUSAL_FILE).write_text(" ".join(str(error).split()))
        raise


def read_refusal(folder: Path) -> str:
    """ "" if nothing was refused."""
    try:
        return (folder / REFUSAL_FILE).read_text()
    except OSError:
        return ""


def forget_refusal(folder: Path) -> None:
    (folder / REFUSAL_FILE).unlink(missing_ok=True)
