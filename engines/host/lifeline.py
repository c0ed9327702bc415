"""Ties an engine process to its gateway, for the engines that are programs of ours.

The settings come as one line on standard input; the sockets lie in a private folder;
and the end of the input is the end of the process, however the gateway ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from engines.config import WorkerConfig
from engines.log_lines import configure_logging


def read_settings() -> WorkerConfig:
    """Wait for the settings, and set up logging as they say.

    Raises:
        msgspec.DecodeError: the line is not a ``WorkerConfig``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    configure_logging(config.log_level)
    return config


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


def stop_event() -> asyncio.Event:
    """Make an event that is set when standard input ends or SIGTERM comes.

    The input ends when the gateway is gone, or wants this process to end.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 1 << 16):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin.fileno(), readable)
    return stop
