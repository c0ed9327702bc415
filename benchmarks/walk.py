"""Counts the files and functions of the product through which a chat passes.

python -m benchmarks.walk [--json OUT]

Traces a real gateway and a real mlx_lm engine: one streamed chat of a known session with its save,
one sleep, one return. Functions that also run while nothing happens (sweeps, heartbeats) are left
out. Each process records the functions of the product that it enters, and writes them to a file at
a signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import psutil

from benchmarks.program import arguments, write_json
from benchmarks.stacks.product_stack import Client, Stack, client_of, prose

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("gateway", "scheduler", "engines", "kvstore", "launch", "thermocline")
SETTLE_S: Final = 3.0  # until a turn's save has ended
IDLE_S: Final = 20.0  # longer than upkeep's rounds
FOLDER: Final = "WALK_FOLDER"
Functions: TypeAlias = dict[str, set[str]]  # by file

# Python imports this module first in every process that has its folder on the path.
TRACER: Final = f'''
import os, signal, sys, threading
FOLDER, ROOT = os.environ["{FOLDER}"], {str(ROOT)!r} + os.sep
FOUND = set()
def note(frame, event, _):
    if event == "call":
        code = frame.f_code
        if code not in FOUND and code.co_filename.startswith(ROOT):
            FOUND.add(code)
def write(*_):
    found = {{(x.co_filename[len(ROOT):], x.co_qualname, x.co_firstlineno) for x in list(FOUND)}}
    FOUND.clear()
    path = os.path.join(FOLDER, str(os.getpid()))
    with open(path + ".new", "w") as file:
        file.writelines("\\t".join(map(str, x)) + "\\n" for x in sorted(found))
    os.rename(path + ".new", path)
signal.signal(signal.SIGUSR2, write)
threading.setprofile(note)
sys.setprofile(note)
'''


class Walk:
    """The traced processes of one server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "sitecustomize.py").write_text(TRACER)
        paths = (str(folder), os.environ.get("PYTHONPATH", ""))
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), FOLDER: str(folder)}

    async def of(self, act: Callable[[], Awaitable[Any]]) -> Functions:
        """Return the functions that ran during ``act`` and shortly after it, by file."""
        self._noted()
        await act()
        await asyncio.sleep(SETTLE_S)
        return self._noted()

    def _noted(self) -> Functions:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for process in psutil.Process().children(recursive=True):
            if process.environ().get(FOLDER) != str(self._folder):
                continue
            path = self._folder / str(process.pid)
            process.send_signal(signal.SIGUSR2)
            end = time.monotonic() + 5.0
            while not path.exists() and time.monotonic() < end:
                time.sleep(0.02)
            if not path.exists():
                continue  # a helper that runs no Python code of ours
            for line in path.read_text().splitlines():
                file, function, number = line.split("\t")
                if Path(file).parts[0] in PACKAGES:
                    found[file].add(f"{function}:{number}")
            path.unlink()
        return found


async def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="thermocline-walk-") as folder:
        walk = Walk(Path(folder))
        with Stack({"engine": {"kind": "mlx"}}, environment=walk.environment) as stack:
            async with client_of(stack) as client:
                return await walks(walk, client)


async def walks(walk: Walk, client: Client) -> dict[str, Any]:
    messages = [{"role": "user", "content": prose("walk", 200)}]

    async def chat() -> None:
        reply = await client.chat(messages, "walk", 16)
        assert reply.ok, reply.error
        messages.append({"role": "assistant", "content": reply.text})
        messages.append({"role": "user", "content": prose(len(messages), 20)})

    await chat()
    await asyncio.sleep(SETTLE_S)
    idle = await walk.of(lambda: asyncio.sleep(IDLE_S))
    acts = {"chat": chat, "sleep": lambda: client.post("/v1/sessions/walk/demote"), "return": chat}
    return {name: figures(without(await walk.of(act), idle)) for name, act in acts.items()}


def without(found: Functions, others: Functions) -> Functions:
    """Return ``found`` without the functions of ``others``; files without any are left out."""
    own = {file: functions - others.get(file, set()) for file, functions in found.items()}
    return {file: functions for file, functions in own.items() if functions}


def figures(found: Functions) -> dict[str, Any]:
    by_package = {x: sum(file.startswith(x + os.sep) for file in found) for x in PACKAGES}
    return {
        "files": len(found),
        "functions": sum(map(len, found.values())),
        "files_by_package": {name: count for name, count in by_package.items() if count},
        "walk": sorted(found),
    }


def main() -> None:
    args = arguments(__doc__, "")
    result = asyncio.run(measure())
    write_json(args.json, result)
    for name, each in result.items():
        print(name, {key: value for key, value in each.items() if key != "walk"})


if __name__ == "__main__":
    main()
