"""Sessions go on while Redis dies and returns, and while an engine that writes there is stopped."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.store.cold_store import ColdStore
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.faults.sharing_process import DEADLINE_S, LONGEST, SESSIONS, history, open_sharing
from tests.kv_sessions import come_back, open_store, ram, ref, save, tokens
from tests.redis_server import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.redis

PATIENCE_S = 60.0  # the breaker's first waits, on a busy machine


def put_to_rest(store: ColdStore, name: str) -> None:
    """Demote a session to Redis, which may be too slow for it at first on a busy machine."""
    until(lambda: store.demote(ref(name), "redis") == "redis", what=name)


def test_sessions_go_on_while_redis_dies_and_returns() -> None:
    histories = {str(i): tokens(64, i) for i in range(3)}
    stop = threading.Event()
    failures: list[BaseException] = []
    with RedisServer() as server:
        far = RedisTier(server.url, deadline_s=1.0)
        store = open_store([ram(), far])
        for name, history in histories.items():
            save(store, ref(name), history)
            put_to_rest(store, name)
        assert come_back(store, ref("0"), histories["0"])[1].num_tokens == 64
        assert store.flush(PATIENCE_S)  # its copies on their way to memory
        put_to_rest(store, "0")

        def ask(name: str) -> None:
            try:
                while not stop.is_set():  # compares every restored bit
                    come_back(store, ref(name), histories[name])
                    time.sleep(0.01)
            except BaseException as error:
                failures.append(error)

        server.kill()
        threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in histories]
        for thread in threads:
            thread.start()
        until(lambda: far.stats().available is False, what="noticed")
        for name, history in histories.items():
            match, restored = come_back(store, ref(name), history)
            assert (match.num_tokens, restored.num_tokens) == (0, 0)
            assert match.reason is not None
        server.start()
        until(lambda: far.stats().available is True, what="asked again")
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert failures == []
        assert come_back(store, ref("1"), histories["1"])[1].num_tokens == 0  # it is empty now
        longer = [*histories["1"], *tokens(20, 9)]
        save(store, ref("1"), longer)
        put_to_rest(store, "1")
        assert come_back(store, ref("1"), longer)[1].num_tokens == 80
        store.close()


ROOT = Path(__file__).parents[2]
FIRST, SECOND, OURS = 1, 2, 3
WAIT_S = 60.0


class Writer:
    """A process that saves turns; ``saved`` grows while it runs."""

    def __init__(self, url: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.faults.sharing_process", url, str(seed)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.saved: list[tuple[str, int]] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                if line.endswith("\n"):  # the last one of a killed process may be cut
                    name, num_tokens = line.split()
                    self.saved.append((name, int(num_tokens)))

    def goes_on(self) -> None:
        """Wait for two more turns."""
        before, end = len(self.saved), time.monotonic() + WAIT_S
        while len(self.saved) < before + 2:
            assert time.monotonic() < end and self._process.poll() is None
            time.sleep(0.01)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()


@contextmanager
def writer(url: str, seed: int) -> Iterator[Writer]:
    made = Writer(url, seed)
    try:
        yield made
    finally:
        made.kill()


def rows_that_come_back(url: str) -> int:
    """Ask for all prompts of all writers; every row is compared with the prompt's own."""
    store = open_sharing(url)
    rows = 0
    for name in SESSIONS:
        for seed in (FIRST, SECOND, OURS):
            rows += come_back(store, ref(name), history(name, LONGEST, seed))[1].num_tokens
    store.close()
    return rows


# Longer than what it waits for the server, and shorter.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("asleep_s", "rounds"),
    [(0.05, 4), (DEADLINE_S + 1.0, 2)],
    ids=["briefly", "beyond a deadline"],
)
def test_who_was_stopped_while_another_went_on_writes_no_wrong_byte(server, asleep_s, rounds):
    moment = random.Random(7)
    rows = 0
    with writer(server.url, FIRST) as first:
        first.goes_on()
        with writer(server.url, SECOND) as second:
            for _ in range(rounds):
                time.sleep(moment.random() / 20)
                first.stop()
                until = time.monotonic() + asleep_s
                second.goes_on()
                rows += rows_that_come_back(server.url)
                time.sleep(max(0.0, until - time.monotonic()))
                first.cont()
                rows += rows_that_come_back(server.url)
                first.goes_on()
                rows += rows_that_come_back(server.url)
    assert rows > 0
    store = open_sharing(server.url)  # and it goes on as if nothing had been
    for name in SESSIONS:
        turn = history(name, LONGEST, OURS)
        save(store, ref(name), turn)
        assert come_back(store, ref(name), turn)[1].num_tokens == LONGEST
    store.close()
    last = open_sharing(server.url)
    for name in SESSIONS:
        turn = history(name, LONGEST, OURS)
        assert come_back(last, ref(name), turn)[1].num_tokens == LONGEST
    last.close()
