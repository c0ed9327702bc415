"""Real groups of processes with a limit of memory, where the test may make one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class Group:
    """A group that processes can be started in, of cgroup v1 or v2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def within(self) -> list[str]:
        """A command that runs the command after it in this group."""
        return ["sh", "-c", f'echo $$ >"{self.folder}/cgroup.procs" && exec "$@"', "sh"]


@contextmanager
def limited_group(limit_bytes: int) -> Iterator[Group | None]:
    """Make a group; None where this user may not."""
    v1 = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if v1 else ROOT) / f"thermocline-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if v1 else "memory.max"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        try:
            (folder / limit).write_text(str(limit_bytes))
        except OSError:
            yield None
            return
        yield Group(folder)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a group once its last process has left it."""
    end = time.monotonic() + 30
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
