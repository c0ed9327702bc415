"""vLLM behind the gateway: its own OpenAI server with our plug-in, in an environment of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from engines.child import ChildEngine
from engines.config import WorkerConfig
from engines.restarts import RestartRules
from engines.vllm_env import import_path
from engines.vllm_fields import with_session
from engines.wire import SessionRef


class VllmServer(ChildEngine):
    """Started, watched and restarted by the gateway."""

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
