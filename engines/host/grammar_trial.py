"""Tries grammars out in a separate process, which is killed if the client leaves meanwhile.

``python -m engines.host.grammar_trial`` is that process. It reads a vocabulary, then grammars, each
with its length in front, and writes a ``Verdict`` for each; ``serve`` does so with any compiler.
A compiler cannot be interrupted, so a thread of the process ends it if a grammar takes too much
time or memory. The system's resource limits do so if this thread gets no CPU time.
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
# A process that gives no verdict for so long gets no CPU; its own limits count CPU seconds only.
SILENT_S: Final = 30.0
BEGIN_S: Final = 120.0  # vLLM's trial imports libraries, which takes long on a busy machine
# Exit codes: the process had grown by earlier grammars, or was killed from outside.
_NOT_ITS_FAULT: Final = frozenset({0, -signal.SIGKILL, -signal.SIGTERM})
NO_TRIAL: Final = "cannot be tried out now; try again later"
# Compiling 128 functions with 39 optional properties each takes 0.2 CPU seconds.
MAX_CPU_S: Final = 1.0
MAX_GROWTH_BYTES: Final = 64 << 20
SPARE_BYTES: Final = 512 << 20  # of address space, of which a process uses more than of memory
LOOK_S: Final = 0.01
TOO_LONG: Final = 3  # exit codes
TOO_LARGE: Final = 4
NICENESS: Final = 10  # the engine's own work goes first

Judge: TypeAlias = Callable[[bytes], Verdict]  # takes an encoded grammar


class Tryable(Protocol):
    """A grammar that the trial program understands: a msgspec struct."""

    @property
    def param(self) -> str:
        """The request's field that asks for the grammar."""


class GrammarTrials:
    """Asks a process of its own to compile grammars, one at a time; belongs to the event loop."""

    def __init__(self, vocabulary: Callable[[], msgspec.Struct], program: str = PROGRAM) -> None:
        """Make a client; the process starts at ``begin`` or with the first grammar.

        Args:
            vocabulary: returns the first message to a process; called on a thread at each start.
            program: the process's module.
        """
        self._vocabulary = vocabulary
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._beginning: asyncio.Task[None] | None = None
        self.num_begun = 0  # processes started

    async def begin(self) -> None:
        """Start the process, so that the first grammar need not wait for it."""
        with suppress(OSError, EOFError):  # the first grammar's verdict will report it
            await self._running()

    async def of(self, source: Tryable) -> Verdict:
        """Return the verdict on a grammar; if this call is cancelled, the process is killed."""
        body = msgspec.json.encode(source)  # msgpack cannot carry integers of any size
        try:
            async with asyncio.timeout(BEGIN_S):
                await self._running()
            async with asyncio.timeout(SILENT_S):
                verdict = await self._asked(body) or await self._asked(body)
        except (TimeoutError, OSError, EOFError):  # EOFError: it ended before it was ready
            verdict = None
        except BaseException:  # cancelled: its client left
            await self._end()
            raise
        if verdict is None:
            await self._end()
            return Verdict(NO_TRIAL, source.param, is_final=False)
        return msgspec.structs.replace(verdict, param=verdict.param or source.param)

    async def close(self) -> None:
        """Kill the process."""
        if self._beginning is not None:
            self._beginning.cancel()
            await asyncio.wait([self._beginning])
        await self._end()

    async def _asked(self, body: bytes) -> Verdict | None:
        """Return the verdict; None if the process ended and this grammar was not the cause."""
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
            # The caller may be cancelled meanwhile; the start goes on for the next caller.
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
        # Verdicts carry the errors; standard error would have only Rust's panic messages.
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
    """A model's vocabulary for llguidance."""

    tokenizer: str  # the JSON of a fast tokenizer
    width: int  # number of tokens
    eos: list[int]


class Watch:
    """A thread that ends this process when the current grammar takes too much time or memory."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._began_s = float("inf")  # CPU time of this process; infinity = no grammar is tried
        self._usual_bytes = self.nbytes()
        threading.Thread(target=self._look, daemon=True).start()

    def nbytes(self) -> int:
        """Return the resident memory of this process, in bytes."""
        return int(self._process.memory_info().rss)

    @property
    def is_grown(self) -> bool:
        """True if so much memory stayed allocated that the next grammar might be blamed for it."""
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
    """Make the system kill this process, should the watching thread fail to end it."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used_s + 2 * MAX_CPU_S) + 1, hard))


def _limit_memory() -> None:
    if sys.platform == "linux":  # elsewhere the limit is not enforced, or cannot be set
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = psutil.Process().memory_info().vms + SPARE_BYTES
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def serve(asked: BinaryIO, said: BinaryIO, begin: Callable[[bytes], Judge]) -> None:
    """Write a verdict for each grammar read, until the input ends or the process has grown too big.

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
    """Read and return the next frame; b"" at the end of the input."""
    length = int.from_bytes(asked.read(4), "big")
    return asked.read(length) if length else b""


def _say(said: BinaryIO, verdict: Verdict) -> None:
    body = msgspec.msgpack.encode(verdict)
    said.write(len(body).to_bytes(4, "big") + body)
    said.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, _begin)
