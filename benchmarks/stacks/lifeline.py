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
import time
import urllib.request
from collections.abc import Mapping, Sequence
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
        self, process: subprocess.Popen[Any], *, group: bool = False, patience_s: float = PATIENCE_S
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


class Running:
    """A server as a process, until ``end``; ended, too, when this program is gone.

    Args:
        out: gets all that it prints; ``tail`` is its end.
        group: it leads a group, which is killed at last.
        patience_s: from SIGTERM to SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        out: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        group: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.out, self._group, self._patience_s = out, group, patience_s
        with out.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=env, cwd=cwd, start_new_session=group
            )
        self._lifeline = Lifeline(self.process, group=group, patience_s=patience_s)

    def wait_for(self, url: str, timeout_s: float) -> None:
        """Wait until ``url`` answers 200. Raises ``RuntimeError``: the server ended, or it did not.

        A server that did not start is ended.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)
        self.end()
        raise RuntimeError(f"no answer at {url}:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.out.read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> int:
        """End it patiently at first; returns its exit code."""
        self.process.terminate()
        try:
            self.process.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if self._group:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._lifeline.let_go()
        return self.process.wait()


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
