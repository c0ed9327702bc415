"""Replaces files atomically: after a crash, the old or the new content is there, complete."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_file(file: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file's content atomically; a symbolic link is followed. Raises ``OSError``."""
    target = Path(os.path.realpath(file))
    made = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(descriptor, mode)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        made.replace(target)
    except OSError:
        with suppress(OSError):
            made.unlink()
        raise
