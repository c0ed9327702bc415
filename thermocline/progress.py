"""Progress on stderr, for steps that take minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable


def reporter(name: str, progress: bool | None) -> Callable[[str], None]:
    """Return the function to which a step reports its progress; it writes a line to stderr.

    ``progress``: whether it writes at all; None = only on a terminal.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        return lambda words: None
    return lambda words: print(f"{name}: {words}", file=sys.stderr, flush=True)
