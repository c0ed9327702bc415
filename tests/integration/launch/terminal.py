"""A program at a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time

WAIT_S = 60.0


class Terminal:
    def __init__(self, *command: str) -> None:
        self._screen, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "60"},
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = ""

    def until(self, words: str) -> None:
        """Wait until these words were shown since something was typed."""
        end = time.monotonic() + WAIT_S
        while words not in self._seen:
            assert time.monotonic() < end, self._seen
            self._read()

    def _read(self) -> None:
        if select.select([self._screen], [], [], 0.2)[0]:
            self._seen += os.read(self._screen, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        self._seen = ""
        os.write(self._screen, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Read on until the program has ended: a full terminal would hold it up."""
        end = time.monotonic() + WAIT_S
        try:
            while self._process.poll() is None and time.monotonic() < end:
                self._read()
        except OSError:  # the other end is closed
            pass
        code = self._process.wait(WAIT_S)
        os.close(self._screen)
        return code
