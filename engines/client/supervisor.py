"""Starts and watches a child process, and starts it again when it ends.

The child gets its settings as one line on standard input. The pipe stays open: when it closes, the
child knows that the gateway has ended, so a child never outlives the gateway. A child that is asked
to end gets ``LAST_LINE`` first. It runs in a process group of its own, so a Ctrl-C in the terminal
reaches only the gateway, which then ends the child in an orderly way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from engines.config import LAST_LINE, WRONG_SETTINGS
from engines.log_lines import read_line
from engines.runtime_folder import SCRATCH, fresh_scratch

Seconds = Annotated[float, msgspec.Meta(gt=0)]
log = logging.getLogger("thermocline.engines")
TERM_GRACE_S = 5.0
MAX_LOG_LINE = 4096
REST_S = 2.0  # the longest wait for the children of a dead child
# Errors of a write after the child has closed its input; RuntimeError is uvloop's.
_HAS_ENDED = (ConnectionError, RuntimeError)
_CONTROL_CHARACTERS = {code: "?" for code in [*range(32), *range(0x7F, 0xA0)] if code != 9}


class RestartRules(msgspec.Struct, frozen=True, kw_only=True):
    """The delays between restarts, and the number of failures that make a crash loop."""

    first_delay_s: Seconds = 0.5
    longest_delay_s: Seconds = 30.0
    # After a process that ran for at least this long, the delay starts anew.
    stable_after_s: Seconds = 60.0
    # This many shorter lives in a row are a crash loop; this many equal ends in a row are hopeless.
    loop_after: int = 5


class RestartPolicy:
    """Doubles the restart delay with every short life, up to a cap; a long life resets it."""

    def __init__(self, rules: RestartRules | None = None) -> None:
        self._rules = rules or RestartRules()
        self._started_at = 0.0
        self.num_short_lives = 0
        self._last_end = ""
        self.num_alike = 0

    @property
    def hopeless(self) -> bool:
        """True after too many equal ends in a row, however long the process lived each time."""
        return self.num_alike >= self._rules.loop_after

    @property
    def crash_looping(self) -> bool:
        """True after too many short lives in a row."""
        return self.num_short_lives >= self._rules.loop_after

    def started(self, now: float) -> None:
        """Record a start at ``now``, in seconds of any clock that ``ended`` uses, too."""
        self._started_at = now

    def ended(self, now: float, how: str) -> float:
        """Record an end and its description; return the seconds to wait before the next start."""
        rules = self._rules
        self.num_alike = self.num_alike + 1 if how == self._last_end else 1
        self._last_end = how
        if now - self._started_at >= rules.stable_after_s:
            self.num_short_lives = 0
        delay_s = rules.first_delay_s * float(2 ** min(self.num_short_lives, 32))
        self.num_short_lives += 1
        return min(rules.longest_delay_s, delay_s)


class Supervisor:
    """Keeps one child process running; belongs to the event loop."""

    def __init__(
        self,
        argv: Sequence[str],
        first_line: bytes,
        env: Mapping[str, str],
        *,
        name: str,
        folder: Path,
        served: Callable[[], bool] = lambda: False,
        rules: RestartRules | None = None,
        term_grace_s: float = TERM_GRACE_S,
    ) -> None:
        """Make a supervisor; nothing runs before ``start``.

        Args:
            first_line: written to the child's standard input; the pipe stays open.
            env: added to this process's environment.
            name: the child's lines are logged by the logger ``thermocline.engine.<name>``.
            folder: a private folder, below which the child's temporary files lie.
            served: returns True once a child has been ready to serve.
            rules: when to restart; None = the defaults.
            term_grace_s: time between SIGTERM and SIGKILL, in seconds.
        """
        self._term_grace_s = term_grace_s
        self._argv = list(argv)
        self._first_line = first_line
        self._folder = folder
        self._env = {**os.environ, **env, "TMPDIR": str(folder / SCRATCH)}
        self._log = logging.getLogger(f"thermocline.engine.{name}")
        self._rules = rules
        self._policy = RestartPolicy(rules)
        self._served = served
        self._process: Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = False
        self.num_starts = 0
        self._last_end = ""
        self._last_words = (False, "")  # (is an error, text) of the child's most telling log line
        self.gave_up = False  # the child cannot serve with its settings, and is not started again

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no child."""
        return self._process.pid if self._process else None

    @property
    def trouble(self) -> str:
        """A sentence on how the child ended, while none runs or it keeps failing; else ""."""
        if self._policy.crash_looping:
            return (
                f"the engine keeps failing: {self._policy.num_short_lives} short lives in a row,"
                f" the last {self._last_end}; see its log lines"
            )
        return "" if self._process else self._last_end and f"the engine {self._last_end}"

    async def start(self) -> None:
        """Start the child; returns at once. After ``stop`` it may be called again."""
        self._stopping = self.gave_up = False
        self._policy, self._last_end = RestartPolicy(self._rules), ""
        self._keeping = asyncio.create_task(self._keep_running(), name="engine-supervisor")

    async def stop(self, grace_s: float) -> None:
        """Close the child's input, so that it saves and ends; SIGTERM after ``grace_s`` seconds.

        SIGKILL follows if the child ignores SIGTERM.
        """
        self._stopping = True
        process = self._process
        if process is not None:
            await _end(process, grace_s, self._term_grace_s)
        if self._keeping is not None:
            if process is not None:  # ``_run_once`` returns when the child's children have ended
                await asyncio.wait([self._keeping], timeout=2 * REST_S)
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            self._keeping = None

    def kill(self, why: str) -> None:
        """Kill a child that hangs; it is started again like one that crashed."""
        if self._process is not None:
            log.error("killing the engine (pid %d): %s", self._process.pid, why)
            _kill(self._process)
            asyncio.get_running_loop().call_later(REST_S, _kill_group, self._process)

    async def _keep_running(self) -> None:
        while True:
            self._policy.started(time.monotonic())
            code = await self._run_once()
            delay_s = self._policy.ended(time.monotonic(), self._last_end)
            if self._stopping:
                return
            if not self._served():  # if a child was ready once, another start may succeed
                self.gave_up = code == WRONG_SETTINGS or self._policy.hopeless
            if self.gave_up:
                if code != WRONG_SETTINGS:  # otherwise the child has logged the reason itself
                    log.error(
                        "the engine %s %d times in a row and was never ready, so it is not started"
                        " again; its last log line: %s",
                        self._last_end,
                        self._policy.num_alike,
                        self._last_words[1] or "nothing",
                    )
                return
            log.error("the engine %s; starting it again in %.1f s", self._last_end, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> int | None:
        """Run the child once; return its exit code, None if it could not be started."""
        self._last_words = (False, "")
        try:
            await asyncio.to_thread(fresh_scratch, self._folder)
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=self._env,
                start_new_session=True,
            )
        except OSError as error:
            self._last_end = f"could not be started: {error}"
            return None
        self._process = process
        self.num_starts += 1
        log.info("engine started, pid %d", process.pid)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write_first_line(process))
                logs = process.stdout, process.stderr
                relays = [group.create_task(self._relay_log(x)) for x in logs]
                code = await process.wait()
                # On Linux vLLM's processes die with their parent. Python's resource tracker, which
                # holds the log pipes, then removes their shared memory, and ends by itself.
                await asyncio.wait(relays, timeout=REST_S)
                _kill_group(process)
        finally:
            _kill_group(process)  # this task may have been cancelled
            self._process = None
        self._last_end = _describe(code)
        return code

    async def _write_first_line(self, process: Process) -> None:
        assert process.stdin is not None
        with suppress(*_HAS_ENDED):
            process.stdin.write(self._first_line)
            await process.stdin.drain()

    async def _relay_log(self, stream: asyncio.StreamReader | None) -> None:
        """Log every line of the child, at the level that it states.

        Long lines are cut, control characters are replaced.
        """
        assert stream is not None
        rest = b""
        while received := await stream.read(1 << 16):
            *lines, rest = (rest + received).split(b"\n")
            if len(rest) > MAX_LOG_LINE:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._log_line(line)
        self._log_line(rest)

    def _log_line(self, line: bytes) -> None:
        text = line[:MAX_LOG_LINE].decode("utf-8", "replace").rstrip()
        if text:
            level, words = read_line(text)
            words = words.translate(_CONTROL_CHARACTERS)
            self._log.log(level, "%s", words)
            is_error = level >= logging.ERROR
            if is_error or not self._last_words[0]:
                self._last_words = (is_error, words)


async def _end(process: Process, grace_s: float, term_grace_s: float) -> None:
    assert process.stdin is not None
    with suppress(*_HAS_ENDED):
        process.stdin.write(LAST_LINE)
    process.stdin.close()
    if await _ended(process, grace_s):
        return
    log.warning("the engine still runs %.0f s after its input was closed; SIGTERM", grace_s)
    with suppress(ProcessLookupError):
        process.terminate()
    if await _ended(process, term_grace_s):
        return
    log.error("the engine ignores SIGTERM; SIGKILL")
    _kill(process)
    if not await _ended(process, REST_S):  # its children hold the log pipes open
        _kill_group(process)
        await process.wait()


async def _ended(process: Process, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def _kill_group(process: Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
