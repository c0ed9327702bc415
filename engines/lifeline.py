"""What ties an engine process to its gateway, for the engines that are programs of ours.

The settings come as one line on standard input; the sockets lie in a folder that is nobody else's;
and the end of the input is the end of the process, however the gateway went.
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
    """Wait for the settings, and start to log as they say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    configure_logging(config.log_level)
    return config


def runtime_folder(config: WorkerConfig) -> Path:
    """Private, as is all that this process will create; no sockets in it. Raises ``OSError``."""
    os.umask(0o077)
    folder = Path(config.runtime_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("http.sock", "control.sock"):
        (folder / name).unlink(missing_ok=True)  # of a process that was killed
    return folder


def stop_event() -> asyncio.Event:
    """Set when standard input ends (the gateway is gone, or wants us to) or SIGTERM comes."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 1 << 16):
            loop.remove_reader(sys.stdin.fileno())
            stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(sys.stdin.fileno(), readable)
    return stop
