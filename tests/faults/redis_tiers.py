"""Redis tiers for tests of their faults: a clock to move, a slow line, blobs to lose."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from kvstore.tiers.redis_server.redis_tier import TTL_S, RedisTier

DEADLINE_S = 0.5
PATIENCE_S = 60.0
RESET_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a reset
LONGEST_S = 1.5 * DEADLINE_S + 4.0  # the most that a call may take, on a busy machine


class Clock:
    """Real time that a test can move forward."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


@contextmanager
def tier_at(url: str, **options: float) -> Iterator[tuple[RedisTier, Clock]]:
    clock = Clock()
    tier = RedisTier(
        url,
        deadline_s=options.get("deadline_s", DEADLINE_S),
        ttl_s=options.get("ttl_s", TTL_S),
        monotonic=clock,
    )
    try:
        yield tier, clock
    finally:
        tier.close()


def blobs(count: int, length: int = 700_000) -> dict[bytes, bytes]:
    return {b"c%032d" % i: random.Random(i).randbytes(length) for i in range(count)}


def names(client: redis.Redis) -> list[bytes]:
    return sorted(client.scan_iter())


class SlowLine:
    """A TCP proxy that passes on a few bytes at a time, late, and now and then breaks off.

    Args:
        latency_s: before each piece, in either direction.
        reset_share: of the pieces; instead of being passed on, one ends its connection by a reset.
    """

    def __init__(
        self, url: str, bytes_per_s: int, latency_s: float = 0.0, reset_share: float = 0.0
    ) -> None:
        self._target = int(url.rpartition(":")[2].partition("/")[0])
        self.bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self.reset_share = reset_share
        self._chance = random.Random(5)
        self.num_resets = 0
        self.answered_bytes = 0  # from the server, as far as they were passed on
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._links: list[socket.socket] = []
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> SlowLine:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for link in self._links:
            link.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._links += [near, far]
            for ends in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(65536):
                if self._chance.random() < self.reset_share:
                    self.num_resets += 1
                    for end in (source, target):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
                    return
                time.sleep(self._latency_s + answers * len(data) / self.bytes_per_s)
                target.sendall(data)
                self.answered_bytes += answers * len(data)
        except OSError:
            pass
        finally:
            target.close()
            source.close()
