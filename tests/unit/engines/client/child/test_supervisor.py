"""A child process that is watched, started again and ended in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from engines.client.child.restarts import RestartPolicy, RestartRules
from engines.client.child.supervisor import Supervisor
from engines.config import WRONG_SETTINGS

QUICK = RestartRules(first_delay_s=0.01, longest_delay_s=0.05, stable_after_s=60, loop_after=3)
LISTEN = "import sys; print('got', sys.stdin.readline().strip(), flush=True); sys.stdin.read()"


# ---- the policy, without processes


def test_delays_double_up_to_the_cap() -> None:
    policy = RestartPolicy(RestartRules(first_delay_s=1, longest_delay_s=5))
    delays = []
    for now in range(4):
        policy.started(now)
        delays.append(policy.ended(now))
    assert delays == [1, 2, 4, 5]


def test_a_long_life_is_forgiven() -> None:
    policy = RestartPolicy(RestartRules(first_delay_s=1, stable_after_s=60, loop_after=2))
    for now in (0, 10):
        policy.started(now)
        policy.ended(now)
    assert policy.crash_looping
    policy.started(20)
    assert policy.ended(80) == 1
    assert not policy.crash_looping


def test_a_thousand_short_lives_do_not_overflow() -> None:
    policy = RestartPolicy()
    for now in range(1000):
        policy.started(now)
        assert policy.ended(now) <= 30


# ---- real processes


@asynccontextmanager
async def running(program: str, line: bytes = b"hello\n") -> AsyncIterator[Supervisor]:
    supervisor = Supervisor([sys.executable, "-c", program], line, {}, name="test", rules=QUICK)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        await supervisor.stop(5.0)


async def until(condition: Callable[[], object], within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_settings_arrive_and_output_becomes_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with running(LISTEN, b"the settings\n"):
        await until(lambda: "got the settings" in caplog.text)
    assert "thermocline.engine.test" in caplog.text


async def test_log_lines_are_cut_and_cleaned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    program = "print('\\x1b[31mred\\x00', 'x' * 20000, flush=True); import sys; sys.stdin.read()"
    async with running(program):
        await until(lambda: "?[31mred?" in caplog.text)
    assert max(len(x.getMessage()) for x in caplog.records) < 5000


async def test_a_line_keeps_its_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    program = "print('WARNING mind the gap', flush=True); import sys; sys.stdin.read()"
    async with running(program):
        await until(lambda: "mind the gap" in caplog.text)
    assert ("thermocline.engine.test", logging.WARNING, "mind the gap") in caplog.record_tuples


async def test_a_child_that_cannot_serve_is_not_started_again() -> None:
    async with running(f"raise SystemExit({WRONG_SETTINGS})") as supervisor:
        await until(lambda: supervisor.gave_up)
        await asyncio.sleep(0.2)
        assert (supervisor.num_starts, supervisor.pid) == (1, None)
        assert f"code {WRONG_SETTINGS}" in supervisor.trouble


async def test_settings_that_were_right_once_are_tried_again() -> None:
    async with running(f"raise SystemExit({WRONG_SETTINGS})") as supervisor:
        supervisor.has_served()
        await until(lambda: supervisor.num_starts > 1)
        assert not supervisor.gave_up


async def test_a_killed_child_is_started_again() -> None:
    async with running(LISTEN) as supervisor:
        await until(lambda: supervisor.pid)
        first = supervisor.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.pid not in (None, first))
        assert supervisor.num_starts == 2


async def test_a_crash_loop_is_reported() -> None:
    async with running("raise SystemExit(3)") as supervisor:
        await until(lambda: "keeps failing" in supervisor.trouble)
        assert "code 3" in supervisor.trouble


async def test_a_program_that_cannot_be_started_is_reported() -> None:
    supervisor = Supervisor(["/no/such/program"], b"", {}, name="test", rules=QUICK)
    await supervisor.start()
    await until(lambda: "could not be started" in supervisor.trouble)
    await supervisor.stop(0)


async def test_stop_lets_the_child_finish(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    program = "import sys; sys.stdin.read(); print('saved all', flush=True)"
    async with running(program) as supervisor:
        await until(lambda: supervisor.pid)
    assert "saved all" in caplog.text
    assert "SIGTERM" not in caplog.text


async def test_a_deaf_child_is_killed_with_its_own_children() -> None:
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)\n"
    )
    supervisor = Supervisor(
        [sys.executable, "-c", program], b"", {}, name="test", rules=QUICK, term_grace_s=0.2
    )
    await supervisor.start()
    await until(lambda: supervisor.pid and psutil.Process(supervisor.pid).children())
    assert supervisor.pid is not None
    family = [psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children()]
    await supervisor.stop(0.2)
    await until(lambda: not any(_alive(x) for x in family))


async def test_hanging_child_is_replaced_on_demand() -> None:
    async with running(LISTEN) as supervisor:
        await until(lambda: supervisor.pid)
        first = supervisor.pid
        supervisor.kill("no answer")
        await until(lambda: supervisor.pid not in (None, first))


async def test_the_child_sees_the_end_of_a_gateway_that_was_killed() -> None:
    """Its standard input ends, however the parent died."""
    program = (
        "import asyncio, sys\n"
        "from engines.client.child.supervisor import Supervisor\n"
        "async def main():\n"
        f"    s = Supervisor([sys.executable, '-c', {LISTEN!r}], b'x\\n', {{}}, name='t')\n"
        "    await s.start()\n"
        "    while not s.pid: await asyncio.sleep(0.01)\n"
        "    print(s.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await until(lambda: not _alive(child))


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
