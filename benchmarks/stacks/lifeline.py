"""Ends a server when the program that started it has ended, by a signal or otherwise.

A benchmark that a signal ends cannot stop its servers. So each server gets a small watching
process, whose standard input is closed when the benchmark ends; then it ends the server.
``python benchmarks/stacks/lifeline.py PID STARTED GROUP PATIENCE_S`` is that process.
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
PATIENCE_S = 60.0  # for a server to finish running answers and writes


class Lifeline:
    """The watching process of ``process``; the program that started that holds this object.

    Args:
        group: the process leads a process group, whose other members may outlive it.
        patience_s: seconds from SIGTERM to SIGKILL.
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
        """End the watching process, since the server has ended."""
        try:
            self._watch.communicate(LET_GO, timeout=30)
        except subprocess.TimeoutExpired:
            self._watch.kill()
            self._watch.wait()


class Running:
    """A server's process, which ``end`` or the end of this program ends.

    Args:
        out: the file for the server's output; ``tail`` returns its end.
        group: the server leads a process group, which is killed after it.
        patience_s: seconds from SIGTERM to SIGKILL.
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
        """Wait until ``url`` answers 200.

        Raises ``RuntimeError`` if the server ended or the time passed; the server is then ended.
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
        """End the server by SIGTERM, after ``patience_s`` by SIGKILL; return its exit code."""
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
