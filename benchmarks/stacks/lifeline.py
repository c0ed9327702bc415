"""Ends a server when the program that started it is gone, however that ended.

A benchmark that is ended by a signal cannot stop its servers. So each gets a small process beside
it that waits for the end of its own input, which is the end of the benchmark.
``python benchmarks/stacks/lifeline.py PID STARTED GROUP`` is that process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

LET_GO = b"ended\n"
PATIENCE_S = 60.0  # a server lets running answers end, and ends its writes


class Lifeline:
    """Held by the program that started ``process``.

    Args:
        group: the process leads a group, of which some may outlive it.
        patience_s: from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        process: subprocess.Popen[Any],
        *,
        group: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        started = psutil.Process(process.pid).create_time()
        words = (str(process.pid), repr(started), str(int(group)), repr(patience_s))
        self._watch = subprocess.Popen(
            [sys.executable, str(Path(__file__)), *words],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a signal to the benchmark's group must not end this
        )

    def let_go(self) -> None:
        """Watch no longer: the server has been ended."""
        try:
            self._watch.communicate(LET_GO, timeout=30)
        except subprocess.TimeoutExpired:
            self._watch.kill()
            self._watch.wait()


def _end(pid: int, started: float, group: bool, patience_s: float) -> None:
    try:
        server = psutil.Process(pid)
        if server.create_time() == started:  # else another process has the number
            server.terminate()
            server.wait(patience_s)
    except psutil.NoSuchProcess:
        pass
    except psutil.TimeoutExpired:
        server.kill()
    if group:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def main(pid: str, started: str, group: str, patience_s: str) -> None:
    if sys.stdin.buffer.read() != LET_GO:
        _end(int(pid), float(started), group == "1", float(patience_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
