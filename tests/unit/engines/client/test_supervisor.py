"""A child process that is watched, started again and ended in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import uvloop

from engines.client.supervisor import RestartPolicy, RestartRules, Supervisor
from engines.config import WRONG_SETTINGS
from tests.waiting import eventually

QUICK = RestartRules(first_delay_s=0.01, longest_delay_s=0.05, stable_after_s=60, loop_after=3)
LISTEN = "import sys; print('got', sys.stdin.readline().strip(), flush=True); sys.stdin.read()"


# ---- the policy, without processes


def test_delays_double_up_to_the_cap():
    policy = RestartPolicy(RestartRules(first_delay_s=1, longest_delay_s=5))
    delays = []
    for now in range(2000):  # no number of short lives overflows
        policy.started(now)
        delays.append(policy.ended(now, "x"))
    assert delays == [1, 2, 4] + [5] * 1997


def test_a_long_life_is_forgiven():
    policy = RestartPolicy(RestartRules(first_delay_s=1, stable_after_s=60, loop_after=2))
    for now in (0, 10):
        policy.started(now)
        policy.ended(now, "x")
    assert policy.crash_looping
    policy.started(20)
    assert policy.ended(80, "x") == 1
    assert not policy.crash_looping


def test_ends_of_one_kind_are_hopeless_and_a_change_is_not():
    policy = RestartPolicy(RestartRules(loop_after=3, stable_after_s=1))
    seen = []
    for now, how in enumerate(["a", "a", "b", "b", "b", "a"]):
        policy.started(now * 100)
        policy.ended(now * 100 + 50, how)  # long lives count as well
        seen.append(policy.hopeless)
    assert seen == [False, False, False, False, True, False]


# ---- real processes


@asynccontextmanager
async def running(
    program: str | list[str], line: bytes = b"hello\n", *, served: bool = False, **more: Any
) -> AsyncIterator[Supervisor]:
    """A watched program: its lines of Python, or a command."""
    argv = [sys.executable, "-c", program] if isinstance(program, str) else program
    with TemporaryDirectory() as folder:
        more |= {"name": "test", "folder": Path(folder), "rules": QUICK}
        supervisor = Supervisor(argv, line, {}, served=lambda: served, **more)
        await supervisor.start()
        try:
            yield supervisor
        finally:
            await supervisor.stop(5.0)


async def test_settings_arrive_and_output_becomes_log_lines_cut_and_cleaned(caplog):
    caplog.set_level(logging.INFO)
    said = "print('WARNING mind the gap'); print('\\x1b[31mred\\x00', 'x' * 20000);"
    async with running(said + LISTEN, b"the settings\n"):
        await eventually(lambda: "got the settings" in caplog.text)
    assert ("thermocline.engine.test", logging.WARNING, "mind the gap") in caplog.record_tuples
    assert "?[31mred?" in caplog.text
    assert max(len(x.getMessage()) for x in caplog.records) < 5000


async def test_a_child_that_cannot_serve_is_not_started_again():
    async with running(f"raise SystemExit({WRONG_SETTINGS})") as supervisor:
        await eventually(lambda: supervisor.gave_up)
        await asyncio.sleep(0.2)
        assert (supervisor.num_starts, supervisor.pid) == (1, None)
        assert f"code {WRONG_SETTINGS}" in supervisor.trouble


async def test_settings_that_worked_once_are_tried_again_for_ever():
    async with running(f"raise SystemExit({WRONG_SETTINGS})", served=True) as supervisor:
        await eventually(lambda: supervisor.num_starts > 2 * QUICK.loop_after)
        assert not supervisor.gave_up
        assert "keeps failing" in supervisor.trouble


async def test_a_child_that_never_serves_is_given_up_with_the_reason(caplog):
    program = "print('ERROR no such device'); print('bye'); raise SystemExit(3)"
    async with running(program) as supervisor:
        await eventually(lambda: supervisor.gave_up)
        assert (supervisor.num_starts, supervisor.pid) == (3, None)
    said = [x.getMessage() for x in caplog.records][-1]
    assert "ended with code 3 3 times in a row and was never ready" in said
    assert said.endswith("no such device")


def test_a_child_that_ends_before_it_reads_is_started_again():
    """On the gateway's own kind of loop, whose closed pipes raise other errors than asyncio's."""

    async def lives() -> None:
        ending, settings = ["/bin/sh", "-c", "exit 3"], b"settings" * 1000 + b"\n"
        async with running(ending, settings, served=True) as supervisor:
            await eventually(lambda: supervisor.num_starts > 20)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lives())


async def test_a_child_has_temporary_files_of_its_own_life(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    program = (
        "import os, tempfile, sys\n"
        "found = tempfile.gettempdir()\n"
        "print('found', oct(os.stat(found).st_mode & 0o777), os.listdir(found), flush=True)\n"
        "open(found + '/half-written', 'w').close()\n"
        "sys.stdin.read()\n"
    )
    async with running(program) as supervisor:
        for life in (1, 2):
            await eventually(lambda life=life: caplog.text.count("found 0o700 []") == life)
            supervisor.kill("the test")


async def test_a_killed_child_is_started_again():
    async with running(LISTEN) as supervisor:
        await eventually(lambda: supervisor.pid)
        first = supervisor.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: supervisor.pid not in (None, first))
        assert supervisor.num_starts == 2


async def test_a_program_that_cannot_be_started_is_reported():
    async with running(["/no/such/program"]) as supervisor:
        await eventually(lambda: "could not be started" in supervisor.trouble)


async def test_stop_lets_the_child_finish(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    program = "import sys; sys.stdin.read(); print('saved all', flush=True)"
    async with running(program) as supervisor:
        await eventually(lambda: supervisor.pid)
    assert "saved all" in caplog.text
    assert "SIGTERM" not in caplog.text


async def test_a_deaf_child_is_killed_with_its_own_children():
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)\n"
    )
    async with running(program, term_grace_s=0.2) as supervisor:
        await eventually(lambda: supervisor.pid and psutil.Process(supervisor.pid).children())
        family = [psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children()]
        await supervisor.stop(0.2)
    await eventually(lambda: not any(_alive(x) for x in family))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("hangs", [True, False])
def test_a_killed_childs_resource_tracker_may_finish(tmp_path: Path, run: Any, hangs: bool):
    """It removes the shared memory of the dead, and then ends by itself."""
    removed = tmp_path / "removed"
    tracker = "import sys, time; sys.stdin.read(); time.sleep(0.2); open(sys.argv[1], 'w')"
    program = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', {tracker!r}, {str(removed)!r}]\n"
        "subprocess.Popen(command, stdin=subprocess.PIPE)\n"
        "sys.stdin.read()\n"
    )

    async def killed() -> None:
        async with running(program) as supervisor:
            await eventually(lambda: supervisor.pid and psutil.Process(supervisor.pid).children())
            child = psutil.Process(supervisor.pid)
            if hangs:
                supervisor.kill("it hangs")
            else:
                child.kill()
            await eventually(lambda: supervisor.pid not in (None, child.pid))
            assert removed.exists()

    run(killed())


async def test_the_child_sees_the_end_of_a_gateway_that_was_killed(tmp_path: Path):
    """Its standard input ends, however the parent died."""
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from engines.client.supervisor import Supervisor\n"
        "async def main():\n"
        f"    s = Supervisor([sys.executable, '-c', {LISTEN!r}], b'x\\n', {{}}, name='t',"
        f" folder=Path({str(tmp_path)!r}))\n"
        "    await s.start()\n"
        "    while not s.pid: await asyncio.sleep(0.01)\n"
        "    print(s.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await eventually(lambda: not _alive(child))


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
