"""The engines that the gateway starts as child processes: each joins a client and a supervisor."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from engines.base import SAVE_S
from engines.client.engine_client import EngineClient
from engines.client.supervisor import Supervisor
from engines.config import WorkerConfig
from engines.http import with_session
from engines.vllm_environment.environment import import_path
from engines.wire import SessionRef

LOOK_EVERY_S = 1.0


class ChildEngine(EngineClient):
    """Runs ``python -m <module>`` and talks to it over the two sockets of its runtime folder."""

    module: ClassVar[str]

    def __init__(self, worker: WorkerConfig, env: Mapping[str, str] | None = None) -> None:
        """``env`` is added to the child's environment, for example to preload a BLAS library."""
        super().__init__(worker, env)
        self._start_timeout_s = worker.engine.start_timeout_s
        self._supervisor = Supervisor(
            [self.interpreter(worker), "-m", self.module],
            msgspec.json.encode(worker) + b"\n",
            env or {},
            name=self.module.rpartition(".")[2].removesuffix("_worker"),
            folder=Path(worker.runtime_dir),
            served=lambda: self._link.was_welcomed,
        )
        self._watching: asyncio.Task[None] | None = None

    def interpreter(self, worker: WorkerConfig) -> str:
        """Return the path of the Python interpreter that runs the engine."""
        return sys.executable

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no child."""
        return self._supervisor.pid

    @property
    def trouble(self) -> str:
        if self._stopping or self.ready:
            return super().trouble
        return self._supervisor.trouble or super().trouble

    @property
    def gave_up(self) -> bool:
        return self._supervisor.gave_up

    async def start(self) -> None:
        await super().start()
        await self._supervisor.start()
        self._watching = asyncio.create_task(self._watch(), name="engine-watch")

    async def stop(self, drain_s: float, save_s: float = SAVE_S) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None
        await super().stop(drain_s)
        await self._supervisor.stop(save_s)

    def restart(self, why: str) -> None:
        self._supervisor.kill(why)

    async def _watch(self) -> None:
        """Kill a process that runs but does not answer; the supervisor starts another."""
        loop = asyncio.get_running_loop()
        absent_since, pid, was_ready = loop.time(), self.pid, False
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = loop.time()
            if self.pid != pid:
                absent_since, pid, was_ready = now, self.pid, False
            if self.ready:
                absent_since, was_ready = now, True
            limit_s = self._stall_timeout_s if was_ready else self._start_timeout_s
            if now - absent_since > limit_s:
                self._supervisor.kill(f"no answer for {limit_s:.0f} s")
                absent_since = now


class MlxServer(ChildEngine):
    """mlx_lm, in our own worker process."""

    module = "engines.mlx_worker"


class VllmServer(ChildEngine):
    """vLLM's own OpenAI server with our plug-in, in a Python environment of its own."""

    module = "engines.vllm_plugin"

    def __init__(self, worker: WorkerConfig, env: Mapping[str, str] | None = None) -> None:
        path = {"PYTHONPATH": ours} if (ours := import_path()) else {}
        super().__init__(worker, {**(env or {}), **path})

    def interpreter(self, worker: WorkerConfig) -> str:
        return worker.engine.vllm.python or sys.executable

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        return with_session(body, session)


class FakeServer(ChildEngine):
    """An engine without a model: deterministic text, real processes, real sockets.

    It serves to try, test and measure the gateway and the scheduler without a model
    (``--engine fake``). ``engines.fake_worker.server`` says how to make it fail.
    """

    module = "engines.fake_worker"
