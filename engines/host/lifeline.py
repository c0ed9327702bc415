"""Ties an engine process that we start to the life of its gateway.

The process reads its settings as one line of standard input, keeps its sockets in a private folder,
and ends when the input ends, however the gateway ended. A gateway that stops the engine on purpose
writes ``LAST_LINE`` before it closes the input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from engines.config import LAST_LINE, WorkerConfig
from engines.log_lines import configure_logging


def read_settings() -> WorkerConfig:
    """Wait for the settings, configure logging, and return the settings.

    Raises:
        msgspec.DecodeError: the line is not a ``WorkerConfig``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides when this process ends
    config = msgspec.json.decode(first_line(), type=WorkerConfig)
    configure_logging(config.log_level)
    return config


def first_line() -> bytes:
    """Return one line of standard input; reads no byte after it, which is for ``Lifeline``."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as file:
        return file.readline()


def make_sockets_folder(config: WorkerConfig) -> Path:
    """Make the sockets' folder (mode 0700), remove old sockets and return it. Raises ``OSError``.

    It also sets the umask, so that all files this process creates from now on are private.
    """
    os.umask(0o077)
    folder = Path(config.runtime_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("http.sock", "control.sock"):
        (folder / name).unlink(missing_ok=True)  # left by a process that was killed
    return folder


class Lifeline:
    """The rest of standard input; it ends when the gateway dies or wants this process to end.

    It is read from the file descriptor: a thread blocked in ``sys.stdin`` would hold its lock while
    the interpreter exits.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._ended = False

    def gateway_died(self) -> bool:
        """Return whether the input ended without ``LAST_LINE``."""
        return self._ended and not self._rest.endswith(LAST_LINE)

    def read(self) -> bool:
        """Wait for input and read it; returns False at its end."""
        received = os.read(sys.stdin.fileno(), 1 << 16)
        self._rest = (self._rest + received)[-len(LAST_LINE) :]
        self._ended = not received
        return not self._ended

    def stop_event(self) -> asyncio.Event:
        """Make an event that is set when the input ends or SIGTERM comes."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def readable() -> None:
            if not self.read():
                loop.remove_reader(sys.stdin.fileno())
                stop.set()

        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_reader(sys.stdin.fileno(), readable)
        return stop
