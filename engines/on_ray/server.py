"""One replica: Ray's ``LLMServer`` with our connector, an HTTP server for gateways, and a drain."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import ray.util
from ray import serve
from ray.serve.llm import LLMConfig, LLMServer

from engines.client.engine_client import EngineClient
from engines.config import EngineConfig, WorkerConfig
from engines.on_ray.front import Front, save_all
from engines.on_ray.own_settings import OwnSettings, own_settings
from engines.on_ray.replica_directory import ANNOUNCE_S, NAME
from engines.on_ray.scaling import HOT_SHARE, RUNNING, WAITING
from engines.pool.listed_pool import ListedReplica
from engines.vllm_plugin.process.server import read_refusal
from kvstore.config import StoreConfig

log = logging.getLogger("thermocline.ray")

POLL_S: Final = 0.05
READY_S: Final = 120.0  # for the control connection, once vLLM runs
NOTICED_S: Final = 4.0  # until gateways have read that a replica leaves
SHARE_TO_ANSWER: Final = 0.5  # part of the time to end in which answers may finish
SHARE_TO_SAVE: Final = 0.3
FIGURES_S: Final = 5.0


class ThermoclineServer(LLMServer):
    """A replica of a model, to which gateways send requests at its own address."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, llm_config: LLMConfig, **rest: Any
    ) -> None:
        self._stack = ExitStack()
        self._announcing: asyncio.Task[None] | None = None
        self._front: Front | None = None
        self._leaving = False
        self._directory: Any = None  # a handle
        context = serve.get_replica_context()
        self._name, self._app_name = context.replica_tag, context.app_name
        extra = llm_config.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"]
        number = context.rank.local_rank if context.rank is not None else 0
        self._own = own_settings(
            extra, ray.util.get_node_ip_address(), llm_config.model_id, number, self._stack
        )
        _register_renderers()
        try:
            await super().__init__(llm_config, **rest)
        except Exception as error:  # vLLM says only "engine core initialization failed"
            if refusal := read_refusal(Path(self._own.plugin.runtime_dir)):
                raise RuntimeError(refusal) from error
            raise
        self._control = _client(self._own)
        await self._control.start()
        app = await self.engine.build_asgi_app()
        self._front = Front(app, self._own.plugin.token, self._own.host)
        await self._front.start()
        await self._until_ready()
        self._announcing = asyncio.create_task(self._announce(), name="announcing")

    async def _until_ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while not self._control.ready:
                await asyncio.sleep(POLL_S)

    async def _announce(self) -> None:
        """Announce the replica every ``ANNOUNCE_S`` until cancelled."""
        while True:
            try:
                await self._announce_once()
            except Exception as error:  # the directory may be restarting; gateways continue
                log.warning("the list of replicas was not reached: %s", error)
            await asyncio.sleep(ANNOUNCE_S)

    async def _announce_once(self) -> None:
        assert self._front is not None
        replica = ListedReplica(
            name=self._name,
            url=self._front.url,
            control=self._own.plugin.control,
            leaving=self._leaving,
        )
        if self._directory is None:
            self._directory = serve.get_deployment_handle(NAME, self._app_name)
        async with asyncio.timeout(ANNOUNCE_S * 2):
            await self._directory.announce.remote(msgspec.to_builtins(replica))

    # ---- what Serve asks

    async def check_health(self) -> None:
        """Raise an error if vLLM, its connector or the HTTP server has ended."""
        await super().check_health()
        if self._front is None or self._leaving:
            return
        if not self._front.serves:
            raise RuntimeError("the replica's HTTP server has ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the figures by which ``scaling`` chooses the number of replicas."""
        async with asyncio.timeout(FIGURES_S):
            report = await self._control.stats()
        in_use = report.hot_bytes - report.idle_hot_bytes
        return {
            WAITING: float(report.num_waiting),
            RUNNING: float(report.num_running),
            HOT_SHARE: in_use / max(1, report.hot_capacity_bytes),
        }

    async def __del__(self) -> None:
        """Accept no more requests, finish the answers, save all sessions, and end.

        Serve calls this when it removes the replica, or replaces it by a new one.
        """
        within_s = float(self._llm_config.deployment_config["graceful_shutdown_timeout_s"])
        if self._front is not None:
            self._leaving = True
            with suppress(Exception):  # gateways notice the closed port instead
                await self._announce_once()
            await asyncio.sleep(min(NOTICED_S, within_s / 4))
            if not await self._front.end(within_s * SHARE_TO_ANSWER):
                log.warning("answers were cut: they took longer than half of %g s", within_s)
            if self._own.has_shared_tier:
                num_saved = await save_all(self._control, within_s * SHARE_TO_SAVE)
                log.info("%d sessions are in Redis", num_saved)
            if self._announcing is not None:
                self._announcing.cancel()
            await self._control.stop(0.0)
        await super().__del__()
        self._stack.close()


def _client(own: OwnSettings) -> EngineClient:
    engine = EngineConfig(url="http://127.0.0.1", control=own.plugin.control)
    return EngineClient(
        WorkerConfig(
            engine=engine,
            store=StoreConfig(),
            model_path="",
            served_model_name="",
            runtime_dir=own.plugin.runtime_dir,
            token=own.plugin.token,
        )
    )


def _register_renderers() -> None:
    from engines.vllm_plugin.process.plain_renderer import register

    register()
