"""A router's reader of vLLM's KV events: the set of blocks by medium, as events say."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import Empty, Queue
from typing import Any

import msgspec
import zmq

TOPIC = "kv@pod-1@smol"


class EventReader:
    """Binds, so that engines may come and go. It counts as readers of llm-d's kind do."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._socket.subscribe("kv@")
        self.counts: dict[str, Counter[bytes]] = {}
        self.events: list[dict[str, Any]] = []
        self._batches: Queue[tuple[bytes, bytes]] = Queue()
        # ZMQ subscribes at an engine that connects only while a thread reads.
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def config(self) -> str:
        """The value of vLLM's ``--kv-events-config``."""
        fields = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "topic": TOPIC,
        }
        return msgspec.json.encode(fields).decode()

    def held(self, medium: str) -> set[bytes]:
        """The blocks that are in a medium."""
        return set(self.counts.get(medium, ()))

    def read(self, within_s: float) -> bool:
        """Read the events that have come; False if nothing came."""
        try:
            topic, payload = self._batches.get(timeout=within_s)
        except Empty:
            return False
        assert topic.decode() == TOPIC
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self._take(event)
        return True

    def until(self, condition: Callable[[], object], within_s: float = 60.0) -> None:
        """Read until the condition holds."""
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, {k: len(v) for k, v in self.counts.items()}
            self.read(0.1)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._socket.poll(100):
                topic, _, payload = self._socket.recv_multipart()
                self._batches.put((topic, payload))

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "AllBlocksCleared":
            self.counts.clear()
            return
        counts = self.counts.setdefault(event["medium"], Counter())
        for block_hash in event["block_hashes"]:
            if event["type"] == "BlockStored":
                counts[block_hash] += 1
            elif counts[block_hash] > 1:
                counts[block_hash] -= 1
            else:
                del counts[block_hash]
