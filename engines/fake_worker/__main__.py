"""``python -m engines.fake_worker``: settings on standard input, two sockets, until input ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from engines.config import WorkerConfig
from engines.control_server import ControlServer
from engines.fake_worker.server import DataServer
from engines.fake_worker.shelf import Shelf
from engines.log_lines import configure_logging
from engines.wire import Welcome

logger = logging.getLogger("engines.fake_worker")

MAX_CONTEXT = 32_768


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    configure_logging(config.log_level)
    asyncio.run(serve(config))


async def serve(config: WorkerConfig) -> None:
    os.umask(0o077)
    folder = Path(config.runtime_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("http.sock", "control.sock"):
        (folder / name).unlink(missing_ok=True)  # of a process that was killed
    max_context = config.engine.max_context or MAX_CONTEXT
    welcome = Welcome(
        engine="fake",
        engine_version="1",
        model=config.served_model_name,
        max_context=max_context,
        codec=config.store.codec,
        hibernation=True,
    )
    shelf = Shelf(config.engine.hot_bytes)
    control = ControlServer(config.token, welcome, shelf)
    shelf.listen(control.publish)
    data = DataServer(config.token, config.served_model_name, max_context, shelf)
    runner = await data.serve(f"{folder}/http.sock")
    server = await control.serve(f"unix:{folder}/control.sock")
    logger.info("the fake engine serves %s", config.served_model_name)
    await _input_ended()
    server.close()
    control.close()
    await runner.cleanup()


async def _input_ended() -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def readable() -> None:
        if not os.read(sys.stdin.fileno(), 1 << 16):
            loop.remove_reader(sys.stdin.fileno())
            ended.set()

    loop.add_signal_handler(signal.SIGTERM, ended.set)
    loop.add_reader(sys.stdin.fileno(), readable)
    await ended.wait()


if __name__ == "__main__":
    main()
