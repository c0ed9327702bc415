"""Ties an engine process to its gateway, for the engines that are programs of ours.

The settings come as one line on standard input; the sockets lie in a private folder;
and the end of the input is the end of the process, however the gateway ended. A gateway that
lives on writes ``LAST_LINE`` before it closes the input.
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
    """Wait for the settings, and set up logging as they say.

    Raises:
        msgspec.DecodeError: the line is not a ``WorkerConfig``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides
    config = msgspec.json.decode(first_line(), type=WorkerConfig)
    configure_logging(config.log_level)
    return config


def first_line() -> bytes:
    """Read one line of standard input, and no byte that follows: see ``Lifeline``."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as file:
        return file.readline()


def runtime_folder(config: WorkerConfig) -> Path:
    """Make the folder of the sockets, for this user only, without old sockets. Raises ``OSError``.

    All that this process creates from now on is private, too.
    """
    os.umask(0o077)
    folder = Path(config.runtime_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("http.sock", "control.sock"):
        (folder / name).unlink(missing_ok=True)  # of a process that was killed
    return folder


class Lifeline:
    """The rest of standard input. Its end says: the gateway is gone, or wants this process to end.

    It is read from the file itself: the lock of ``sys.stdin`` would be missed at the end.
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
