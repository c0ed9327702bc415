"""An engine whose data folder stops taking writes while it serves, and takes them again later.

``python -m tests.faults.serving_process FOLDER FAULT``. A limit on the size of files stands
for the file system: at the file's present size the disk is full, at zero no byte of it can be
written any more. Ends as a killed process does.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path

from kvstore.tiers.base import TierStats
from tests.integration.mlx_owner.harness import Engine, engine, session, text

NUM_WHILE = 4
NEW = [5, 6, 7, 8]


def history(number: int) -> list[int]:
    return text(number, 300)


async def serve(folder: Path, fault: str) -> None:
    async with engine("llama", folder) as it:
        await a_turn(it, 0)
        await it.settled()
        assert (await it.verbs.demote(session("0"), "disk")).kept is None
        (data,) = folder.rglob("data.mdb")
        forbid_writing_beyond(data.stat().st_size if fault == "full" else 0)
        for number in range(1, NUM_WHILE + 1):
            await a_turn(it, number)
        await asyncio.to_thread(it.store.flush, 20.0)
        assert disk_of(it).errors > 0, "nothing was refused"
        assert disk_of(it).available
        await what_was_there_is_still_served(it)
        assert (await it.verbs.forget(session("1"))).report is None
        forbid_writing_beyond(resource.RLIM_INFINITY)
        await a_turn(it, NUM_WHILE + 1)
        await it.settled()
        os._exit(0)


async def a_turn(it: Engine, number: int) -> None:
    answer = await it.turn(history(number), session(str(number)))
    assert answer.finished == {0: "length"} and not answer.failed


async def what_was_there_is_still_served(it: Engine) -> None:
    for number in (0, 2):
        prompt = history(number) + NEW
        right = await it.turn(prompt)
        back = await it.turn(prompt, session(str(number)))
        assert back.tokens == right.tokens
        assert back.cache.source != "miss"


def disk_of(it: Engine) -> TierStats:
    return next(x for x in it.store.stats().tiers if x.name == "disk")


def forbid_writing_beyond(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
