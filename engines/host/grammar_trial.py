"""Has grammars tried out in a process of their own, which is ended when its client leaves."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from engines.host.grammar import TOO_MUCH, Verdict
from engines.host.grammar_program import TOO_LARGE, TOO_LONG

PROGRAM: Final = "engines.host.grammar_program"
# A process that is silent for so long got no core. Its own bounds are of the work that it does.
SILENT_S: Final = 30.0
BEGIN_S: Final = 120.0  # on a busy machine the libraries of vLLM's take long to import
# It had grown by earlier grammars, or was killed from outside.
_NOT_ITS_FAULT: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
NO_TRIAL: Final = "cannot be tried out now; try again later"


class Tryable(Protocol):
    """A grammar that the program understands: a struct of msgspec."""

    @property
    def param(self) -> str:
        """The request's field that asks for it."""


class GrammarTrials:
    """A process that compiles grammars. One grammar at a time; belongs to the event loop."""

    def __init__(self, vocabulary: Callable[[], msgspec.Struct], program: str = PROGRAM) -> None:
        """Make one whose process has not begun.

        Args:
            vocabulary: returns the first message to a process; called on a thread as each begins.
            program: its module.
        """
        self._vocabulary = vocabulary
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._beginning: asyncio.Task[None] | None = None
        self.num_begun = 0  # processes

    async def begin(self) -> None:
        """Begin the process, which the first grammar would wait for."""
        with suppress(OSError, EOFError):  # the first grammar says so
            await self._running()

    async def of(self, source: Tryable) -> Verdict:
        """Compile a grammar there; if this call is cancelled, the process is ended at once."""
        body = msgspec.msgpack.encode(source)
        try:
            async with asyncio.timeout(BEGIN_S):
                await self._running()
            async with asyncio.timeout(SILENT_S):
                verdict = await self._asked(body) or await self._asked(body)
        except (TimeoutError, OSError, EOFError):  # the last: it ended before it was ready
            verdict = None
        except BaseException:  # cancelled: its client left
            await self._end()
            raise
        if verdict is None:
            await self._end()
            return Verdict(NO_TRIAL, source.param, is_final=False)
        return msgspec.structs.replace(verdict, param=verdict.param or source.param)

    async def close(self) -> None:
        """End the process."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait([self._beginning])
        await self._end()

    async def _asked(self, body: bytes) -> Verdict | None:
        """Ask for a verdict; None if the process ended for no fault of this grammar."""
        process = await self._running()
        try:
            return await _ask(process, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        code = await process.wait()
        await self._end()
        if code in _NOT_ITS_FAULT:
            return None
        what = {TOO_LONG: "it takes too long to compile", TOO_LARGE: "it takes too much memory"}
        return Verdict(f"cannot be enforced: {what.get(code, TOO_MUCH)}")

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            # Who asked for it may leave meanwhile: it is the next one's, then.
            beginning = self._beginning = self._beginning or asyncio.create_task(self._begin())
            try:
                await asyncio.shield(beginning)
            finally:
                if beginning.done() and self._beginning is beginning:
                    self._beginning = None
        assert self._process is not None
        return self._process

    async def _begin(self) -> None:
        given = await asyncio.to_thread(lambda: msgspec.msgpack.encode(self._vocabulary()))
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        # Its errors are in its answers; what else it prints are Rust's panics.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._program, stdin=pipe, stdout=pipe, stderr=nothing
        )
        self.num_begun += 1
        try:
            await _ask(process, given)
        except BaseException:
            process.kill()
            raise
        self._process = process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())


async def _ask(process: asyncio.subprocess.Process, body: bytes) -> Verdict:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(len(body).to_bytes(4, "big") + body)
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(4), "big")
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Verdict)
