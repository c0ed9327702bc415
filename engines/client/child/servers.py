"""The engines that the gateway starts: which program each runs, and in which environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from engines.about_vllm.environment import import_path
from engines.about_vllm.fields import with_session
from engines.client.child.child_engine import ChildEngine
from engines.client.child.restarts import RestartRules
from engines.config import WorkerConfig
from engines.wire import SessionRef


class MlxServer(ChildEngine):
    """mlx_lm, in a worker process of ours."""

    module = "engines.mlx_worker"


class VllmServer(ChildEngine):
    """vLLM's own OpenAI server with our plug-in, in an environment of its own."""

    module = "engines.vllm_plugin"

    def __init__(
        self,
        worker: WorkerConfig,
        env: Mapping[str, str] | None = None,
        *,
        rules: RestartRules | None = None,
    ) -> None:
        path = {"PYTHONPATH": ours} if (ours := import_path()) else {}
        super().__init__(worker, {**(env or {}), **path}, rules=rules)

    def interpreter(self, worker: WorkerConfig) -> str:
        return worker.engine.vllm.python or sys.executable

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        return with_session(body, session)


class FakeServer(ChildEngine):
    """An engine without a model: deterministic text, real processes, real sockets.

    It lets the gateway and the scheduler be tried, tested and measured where no model is at hand
    (``--engine fake``). ``engines.fake_worker.script`` says how to make it fail.
    """

    module = "engines.fake_worker"
