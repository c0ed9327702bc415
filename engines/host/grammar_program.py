"""``python -m engines.host.grammar_program``: compiles grammars, and ends if one is too much.

It reads a vocabulary, then grammars, each with its length in front, and writes a ``Verdict`` for
each; ``serve`` does so with any compiler. None can be interrupted, so a thread beside it ends the
process. The system's own limits are a second line, for the case that this thread gets no turn or
the other end is gone.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, Final, TypeAlias

import llguidance
import msgspec
import psutil

from engines.host.grammar import GrammarSource, Verdict, tried

# Compiling 128 functions of 39 optional properties each takes a fifth of a second of a core.
MAX_CPU_S: Final = 1.0
MAX_GROWTH_BYTES: Final = 64 << 20
SPARE_BYTES: Final = 512 << 20  # of address space, which a process has more of than of memory
LOOK_S: Final = 0.01
TOO_LONG: Final = 3  # exit codes
TOO_LARGE: Final = 4


NICENESS: Final = 10  # answers that are being written go first

Judge: TypeAlias = Callable[[bytes], Verdict]  # of a grammar, as the other end has written it


class Vocabulary(msgspec.Struct, frozen=True):
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
    given = msgspec.msgpack.decode(frame, type=Vocabulary)
    tokenizer = llguidance.LLTokenizer(given.tokenizer, n_vocab=given.width, eos_token=given.eos)
    width = given.width

    def judge(frame: bytes) -> Verdict:
        return tried(tokenizer, msgspec.msgpack.decode(frame, type=GrammarSource), width)

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
