"""Reads changed inputs by every reader of outside data; checks errors, memory and time.

    python -m benchmarks.fuzz [--count 200000] [--seconds 3600] [--only NAME]

Rows of every method, blobs, states, session records, profiles, and the control messages of both
sides; each reader gets ``count`` changed inputs. More than half of them are forged: a claim of a
header is changed, and lengths, digests and checksums are made valid again. A reader may give an
answer or raise an exception that it documents. Anything else is printed with the input, and the
exit status is 1; so is a use of more than 64 MiB beyond the input, or of more than 50 ms of the
processor (in each of three tries, so that kernels and tables that are made once do not count).

The kernel refuses a reader more than 64 MiB of further address space. An input that needs more, and
one in 64 of the others, is read again while Python counts the bytes, which takes five times as
long.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz_codecs import WINDOWS, Target, codec_targets
from benchmarks.program import arguments, write_json
from engines.vllm_plugin import messages as vllm_messages
from engines.wire import (
    ControlReply,
    ControlRequest,
    Demote,
    Done,
    Hello,
    Prefetch,
    WireError,
    absent,
    frame,
    read_from_engine,
    read_request,
)
from kvstore.codecs.profile import Profile, load_profile
from kvstore.errors import Unusable
from kvstore.session import SessionRef

SESSION = SessionRef("tenant", "session", b"salt")
SHOWN = 10
MOST_BYTES = 64 << 20  # beyond the input
MOST_CPU_S = 0.05
TRIES = 3  # of an input that took too long: kernels and tables are made once
COUNTED = 64  # of this many inputs, one is read while its bytes are counted
PAGE = resource.getpagesize()


# ---- the inputs


def profile_target(folder: Path) -> Target:
    path = folder / "profile"
    learned: dict[str, dict[str, np.ndarray]] = {
        "dense3": {"scale": np.ones(4, np.float32), "codes": np.arange(9, dtype=np.int16)}
    }
    Profile("model", WINDOWS, (None, None), learned).save(path)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        load_profile(path)

    return Target("profile", (path.read_bytes(),), read, (Unusable,))


def wire_targets(loop: asyncio.AbstractEventLoop) -> Iterator[Target]:
    requests: tuple[Any, ...] = (Hello("token"), Prefetch(SESSION), Demote(SESSION, "disk"))
    seeds = tuple(frame(ControlRequest(i, x)) for i, x in enumerate(requests))
    answers = (frame(ControlReply(1, Done(absent(SESSION)))), frame(ControlReply(2, Done(None))))

    def reader(function: Callable[[asyncio.StreamReader], Any]) -> Callable[[bytes], object]:
        async def feed(data: bytes) -> object:
            stream = asyncio.StreamReader(limit=1 << 20)
            stream.feed_data(data)
            stream.feed_eof()
            return await function(stream)

        return lambda data: loop.run_until_complete(feed(data))

    allowed = (WireError, asyncio.IncompleteReadError)
    yield Target("control message", seeds, reader(read_request), allowed)
    yield Target("control answer", answers, reader(read_from_engine), allowed)
    stage = vllm_messages.Stage(3, SESSION, 1, bytes(64))
    hub = (frame(stage)[4:], frame(vllm_messages.FrontHello())[4:])
    for name in ("to_rank", "from_peer", "to_front"):
        decode = getattr(vllm_messages, f"decode_{name}")
        # The hub and the ranks treat a ``ValueError`` as a broken peer.
        yield Target(f"vLLM's message {name}", hub, decode, (ValueError,))


# ---- the run


@dataclass
class Findings:
    """The outcomes of one reader, and the most memory and time that an input took."""

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    most_bytes: int = 0  # beyond an input
    most_cpu_s: float = 0.0


def fuzz(target: Target, count: int, seconds: float, seed: int) -> Findings:
    """Change inputs and read them until the count or the time is reached; return the findings."""
    chance, found = random.Random(seed), Findings()
    for data in target.seeds:  # makes kernels and tables
        _read(target, data)
        _counted(target, data)
    until = time.monotonic() + seconds
    for number in range(count):
        counted = not number % COUNTED
        if counted and time.monotonic() > until:
            break
        change = chance.choice(target.changes)
        data = change(chance, chance.choice(target.seeds), chance.choice(target.seeds))
        found.outcomes[outcome(target, data, found, counted=counted)] += 1
    bound_memory(0)
    return found


def bound_memory(more: int = MOST_BYTES) -> None:
    """Limit this process's address space to its present size and ``more`` bytes; 0: no limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (size + more if more else hard, hard))


def outcome(target: Target, data: bytes, found: Findings, *, counted: bool) -> str:
    """Read an input, again if it took too much; note the maxima; return the outcome's name."""
    (kind, cpu_s), nbytes = _read(target, data), 0
    if counted or kind.startswith("MemoryError"):
        kind, nbytes = _counted(target, data)
    for _ in range(TRIES - 1):
        if cpu_s > MOST_CPU_S or nbytes > MOST_BYTES:
            kind, nbytes_again = _counted(target, data)
            cpu_s, nbytes = min(cpu_s, _read(target, data)[1]), min(nbytes, nbytes_again)
    found.most_cpu_s, found.most_bytes = max(found.most_cpu_s, cpu_s), max(found.most_bytes, nbytes)
    text = kind if kind not in ("read", "refused") else ""
    if cpu_s > MOST_CPU_S or nbytes > MOST_BYTES:
        text = f"{text} {cpu_s:.3f} s, {nbytes} bytes"
    if text and len(found.defects) < SHOWN:
        found.defects.append(f"{target.name}: {text}: {data.hex()[:2000]}")
    return kind if not text else text.split(":")[0]


def _read(target: Target, data: bytes) -> tuple[str, float]:
    """Read an input; return the outcome and the processor time in seconds."""
    began, kind = time.thread_time(), "read"
    try:
        target.read(data)
    except target.allowed:
        kind = "refused"
    except BaseException as error:  # any other exception is a defect
        if isinstance(error, KeyboardInterrupt):
            raise
        kind = f"{type(error).__name__}: {error}"
    return kind, time.thread_time() - began


def _counted(target: Target, data: bytes) -> tuple[str, int]:
    """Read an input without a limit of memory; return the outcome and the bytes beyond it."""
    bound_memory(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kind, _ = _read(target, data)
    nbytes = tracemalloc.get_traced_memory()[1] - before - len(data)
    tracemalloc.stop()
    bound_memory()
    return kind, nbytes


def _itself(target: Target) -> Target:
    return target


def main() -> None:
    args = arguments(__doc__, "--count 200000 --seconds 3600.0 --seed 0 --only ''")
    found: dict[str, Findings] = {}
    with tempfile.TemporaryDirectory() as folder, closing(asyncio.new_event_loop()) as loop:
        others = [profile_target(Path(folder)), *wire_targets(loop)]
        makers = codec_targets() | {x.name: partial(_itself, x) for x in others}
        for name in (x for x in makers if args.only in x):
            one = found[name] = fuzz(makers[name](), args.count, args.seconds, args.seed)
            print(*one.defects, sep="\n", end="\n" if one.defects else "", file=sys.stderr)
            cost = f"{one.most_bytes >> 10} KiB, {1000 * one.most_cpu_s:.1f} ms"
            print(f"{name}: {one.outcomes.total()} mutations, {cost}", flush=True)
    write_json(args.json, {name: vars(x) for name, x in found.items()})
    sys.exit(any(x.defects for x in found.values()))


if __name__ == "__main__":
    main()
