"""Has grammars tried out in a process of their own, which is ended when its client leaves.

``python -m engines.host.grammar_trial`` is that process. It reads a vocabulary, then grammars, each
with its length in front, and writes a ``Verdict`` for each; ``serve`` does so with any compiler.
None can be interrupted, so a thread beside it ends the process if a grammar takes too much. The
system's own limits are a second line, for the case that this thread gets no turn or the other end
is gone.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Final, Protocol, TypeAlias

import llguidance
import msgspec
import psutil

from engines.host.grammar import TOO_MUCH, GrammarSource, Verdict, tried

PROGRAM: Final = "engines.host.grammar_trial"
# A process that is silent for so long got no core. Its own bounds are of the work that it does.
SILENT_S: Final = 30.0
BEGIN_S: Final = 120.0  # on a busy machine the libraries of vLLM's take long to import
# It had grown by earlier grammars, or was killed from outside.
_NOT_ITS_FAULT: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
NO_TRIAL: Final = "cannot be tried out now; try again later"
# Compiling 128 functions of 39 optional properties each takes a fifth of a second of a core.
MAX_CPU_S: Final = 1.0
MAX_GROWTH_BYTES: Final = 64 << 20
SPARE_BYTES: Final = 512 << 20  # of address space, which a process has more of than of memory
LOOK_S: Final = 0.01
TOO_LONG: Final = 3  # exit codes
TOO_LARGE: Final = 4
NICENESS: Final = 10  # answers that are being written go first

Judge: TypeAlias = Callable[[bytes], Verdict]  # of a grammar, as the other end has written it


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
        body = msgspec.json.encode(source)  # a schema's numbers may have any number of digits
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


class TrialVocabulary(msgspec.Struct, frozen=True):
    """A model's vocabulary, as llguidance takes it."""

    tokenizer: str  # the JSON of a fast tokenizer
    width: int
    eos: list[int]


class Watch:
    """A thread that ends this process when the grammar of the moment takes too much."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began_s = float("inf")  # by this process' clock of its own work
        self._usual_bytes = self.nbytes()
        threading.Thread(target=self._look, daemon=True).start()

    def nbytes(self) -> int:
        """Return the memory of this process."""
        return int(self._process.memory_info().rss)

    @property
    def is_grown(self) -> bool:
        """True if so much stayed that the next grammar would be charged for it."""
        return self.nbytes() > self._usual_bytes + MAX_GROWTH_BYTES // 2

    def __enter__(self) -> None:
        self._began_s = time.process_time()
        _limit_cpu(self._began_s)

    def __exit__(self, *error: object) -> None:
        self._began_s = float("inf")

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            if time.process_time() - self._began_s > MAX_CPU_S:
                os._exit(TOO_LONG)
            if self.nbytes() > self._usual_bytes + MAX_GROWTH_BYTES:
                os._exit(TOO_LARGE)


def _limit_cpu(used_s: float) -> None:
    """Have the system end this process, should the thread not do so."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + 2 * MAX_CPU_S) + 1, hard))


def _limit_memory() -> None:
    if sys.platform == "linux":  # elsewhere it is not kept, or cannot be set
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = psutil.Process().memory_info().vms + SPARE_BYTES
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def serve(asked: BinaryIO, said: BinaryIO, begin: Callable[[bytes], Judge]) -> None:
    """Judge grammars until there are no more, or so much memory stayed that another is to go on.

    Args:
        begin: makes the judge from the first frame that is read.
    """
    os.nice(NICENESS)
    judge = begin(_frame(asked))
    watch = Watch()
    _limit_memory()
    _say(said, Verdict())
    while frame := _frame(asked):
        before = watch.nbytes()
        with watch:
            verdict = judge(frame)
        grown = max(0, watch.nbytes() - before)
        _say(said, msgspec.structs.replace(verdict, nbytes=grown))
        if watch.is_grown:
            return


def _begin(frame: bytes) -> Judge:
    given = msgspec.msgpack.decode(frame, type=TrialVocabulary)
    tokenizer = llguidance.LLTokenizer(given.tokenizer, n_vocab=given.width, eos_token=given.eos)
    width = given.width

    def judge(frame: bytes) -> Verdict:
        return tried(tokenizer, msgspec.json.decode(frame, type=GrammarSource), width)

    return judge


def _frame(asked: BinaryIO) -> bytes:
    """Read what comes next; nothing at the end of the input."""
    length = int.from_bytes(asked.read(4), "big")
    return asked.read(length) if length else b""


def _say(said: BinaryIO, verdict: Verdict) -> None:
    body = msgspec.msgpack.encode(verdict)
    said.write(len(body).to_bytes(4, "big") + body)
    said.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, _begin)
