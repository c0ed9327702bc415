"""What the plug-in refuses to work with, on its way to whoever started vLLM.

The plug-in runs in vLLM's grandchildren. Their exceptions reach the first process as "engine core
initialization failed", so the sentence goes into a file of the runtime folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

FOLDER_VARIABLE: Final = "THERMOCLINE_RUNTIME_DIR"
REFUSAL_FILE: Final = "refusal"


@contextmanager
def told_in(folder: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these ``kinds`` are written down for ``read_refusal`` on their way up."""
    try:
        yield
    except kinds as error:
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
