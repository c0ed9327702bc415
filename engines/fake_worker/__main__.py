"""Runs the fake engine: ``python -m engines.fake_worker``, with settings on standard input."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from engines.config import WorkerConfig
from engines.fake_worker.fake_sessions import CODEC, HOT_BYTES_PER_TOKEN, FakeSessions
from engines.fake_worker.server import DataServer
from engines.host.control_server import ControlServer
from engines.host.lifeline import Lifeline, make_sockets_folder, read_settings
from engines.runtime_folder import held
from engines.wire import KVSize, Welcome

logger = logging.getLogger("engines.fake_worker")

MAX_CONTEXT = 32_768
VISION = "vision"  # a model with this in its name accepts images


def main() -> None:
    config = read_settings()
    lifeline = Lifeline()
    with held(Path(config.runtime_dir), lifeline.gateway_died):
        asyncio.run(serve(config, lifeline))


async def serve(config: WorkerConfig, lifeline: Lifeline) -> None:
    stop = lifeline.stop_event()
    folder = make_sockets_folder(config)
    max_context = config.engine.max_context or MAX_CONTEXT
    welcome = Welcome(
        engine="fake",
        engine_version="1",
        model=config.served_model_name,
        max_context=max_context,
        codec=CODEC,
        hibernation=True,
        can_measure=True,
        live_kv=KVSize(HOT_BYTES_PER_TOKEN),
        bf16_kv=KVSize(HOT_BYTES_PER_TOKEN),
        sees_images=VISION in config.served_model_name,
    )

    async def welcomed() -> Welcome:
        return welcome

    sessions = FakeSessions(config.engine.hot_bytes)
    control = ControlServer(config.token, welcomed, sessions)
    sessions.listen(control.publish)
    data = DataServer(config.token, config.served_model_name, max_context, sessions)
    runner = await data.serve(f"{folder}/http.sock")
    server = await control.serve(f"unix:{folder}/control.sock")
    logger.info("the fake engine serves %s", config.served_model_name)
    await stop.wait()
    server.close()
    control.close()
    await runner.cleanup()


if __name__ == "__main__":
    main()
