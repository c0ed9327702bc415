"""vLLM behind the gateway: its own OpenAI server with our plug-in, in an environment of its own."""

from __future__ import annotations

import sys

from engines.child import ChildEngine
from engines.client import AttachedEngine
from engines.config import WorkerConfig
from engines.vllm_fields import with_session
from engines.wire import SessionRef


class VllmServer(ChildEngine):
    """Started, watched and restarted by the gateway."""

    module = "engines.vllm_plugin"

    def interpreter(self, worker: WorkerConfig) -> str:
        return worker.engine.vllm.python or sys.executable

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        return with_session(body, session)


class AttachedVllm(AttachedEngine):
    """Started elsewhere, in a container for one, with the plug-in and a control address."""

    def prepare_body(self, body: dict[str, object], session: SessionRef) -> dict[str, object]:
        return with_session(body, session)
