"""Stands in for vLLM's HTTP server: puts measuring requests to the engine of a test."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.vllm_plugin.measuring.request_runner import (
    LOGITS_PROCESSOR,
    WORKER_EXTENSION,
    RequestRunner,
)
from engines.vllm_plugin.messages import FrontHello, RunForward, decode_to_front, receive
from engines.wire import frame
from kvstore.config import StoreConfig
from tests.vllm.rig.byte_tokenizer import write_tokenizer
from tests.vllm.rig.engine import RealEngine, opened


@contextmanager
def measuring_engine(
    folder: Path, write: Callable[[Path], Path], store: StoreConfig, **options: Any
) -> Iterator[RealEngine]:
    """An engine of the model that ``write`` makes, in a folder of a test."""

    def with_tokenizer(model: Path) -> Path:
        write_tokenizer(write(model))
        return model

    taking = {"logits_processors": [LOGITS_PROCESSOR], "worker_extension_cls": WORKER_EXTENSION}
    with opened(folder, with_tokenizer, store, **taking, **options) as engine:
        yield engine


class SteppedClient:
    """As much of vLLM's ``EngineClient`` as the runner uses, over an engine that a test steps."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.vllm_config = engine.vllm_config

    async def collective_rpc(self, method: str) -> list[Any]:
        return self._engine.collective_rpc(method)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[Any]:
        self._engine.add_request(request_id, prompt, params, priority=priority)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                yield output


class MeasuringFront:
    """A connection to the hub. ``run_until`` belongs to the thread that steps the engine."""

    def __init__(self, engine: RealEngine) -> None:
        self._runner = RequestRunner(SteppedClient(engine.engine))
        self._engine = engine
        self._orders: queue.SimpleQueue[RunForward] = queue.SimpleQueue()
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(engine.settings.hub_path)
        self._link.sendall(frame(FrontHello()))
        self.num_done = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                message = decode_to_front(receive(self._link))
            except (OSError, EOFError):
                return
            if isinstance(message, RunForward):
                self._orders.put(message)

    def run_until(
        self,
        is_over: Callable[[], bool],
        within_s: float = 400.0,
        step: Callable[[], object] = lambda: None,
    ) -> None:
        """Carry out orders until ``is_over``.

        ``step``: has an engine in this process step while no request runs, as others do themselves.
        """
        end = time.monotonic() + within_s
        while not is_over():
            assert time.monotonic() < end, f"{self.num_done} requests were not enough"
            step()
            try:
                order = self._orders.get(timeout=0.1)
            except queue.Empty:
                continue
            done = asyncio.run(self._runner.run(order))
            assert not done.error, done.error
            self._link.sendall(frame(done))
            self.num_done += 1

    def close(self) -> None:
        self._link.close()
