"""An engine is stopped in the middle of its writing, another goes on with its sessions, and the
first one wakes up and writes on, with its outdated state.

No engine holds a lease that could be stale: a blob's name identifies its content, and the record
of a session names blobs. So the last record wins, and each prompt gets rows of its own tokens or
none.
"""

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

from tests.faults.sharing_process import DEADLINE_S, LONGEST, SESSIONS, history, open_sharing
from tests.kv_sessions import come_back, ref, save

pytestmark = [pytest.mark.redis, pytest.mark.slow]

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
