"""New sessions for ever: of those that are over, nothing but their cold copy is kept."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.mlx_worker.batch.request import PrefillTask, Request, Sequence
from engines.mlx_worker.generation import EventQueue
from engines.mlx_worker.owner import LARGE_BLOCK_BYTES
from engines.mlx_worker.sessions.cold_sessions import HotSession
from tests.integration.mlx_owner.harness import engine, read, session, text

pytestmark = pytest.mark.mlx

MIB = 1 << 20
# More than the holes in this process's heaps, which malloc fills first. They cost no memory: only
# the page with the header of each is ever touched.
NUM_BLOCKS = 4096
OF_A_TURN = (EventQueue, HotSession, PrefillTask, Request, Sequence)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Switches the collector off: a live object is then referenced, or in a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    # By ``type``: other tests leave dead weak proxies, which ``isinstance`` would look through.
    return Counter(type(x).__name__ for x in gc.get_objects() if issubclass(type(x), OF_A_TURN))


@pytest.mark.usefixtures("no_collector")
async def test_turns_that_are_over_are_freed_at_once(tmp_path: Path) -> None:
    async with engine("llama", tmp_path) as it:
        for number in range(4):
            name = session(f"s{number}")
            answer = await it.turn(text(number, 150), name)
            await it.turn(text(number, 150) + answer.tokens + [7, 8], name)
        cancelled = it.submit(text(9, 150), session("cancelled"), max_tokens=4000)
        cancelled.cancel()
        await asyncio.wait_for(read(cancelled), 10)
        del cancelled
        await it.settled()
        await it.demote_all()
        for _ in range(50):  # the restoring threads let go of their last piece of work
            if not alive():
                break
            await asyncio.sleep(0.1)
        assert not alive()
        assert not it.owner.batching.hot_cache.sessions.known


async def test_a_large_block_that_is_freed_goes_back_to_the_system() -> None:
    """The engine's memory would else be what it once used, plus holes that grow for minutes."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        pytest.skip("not glibc")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def look() -> list[bool]:
        libc.free(libc.malloc(24 * MIB))  # teaches glibc, if it may learn, to map only larger ones
        blocks = [libc.malloc(MIB) for _ in range(NUM_BLOCKS)]
        mapped = [_is_mapped(block) for block in blocks]
        for block in blocks:
            libc.free(block)
        return mapped

    async with engine("llama") as it:
        mapped = await it.owner.call(look)
    assert LARGE_BLOCK_BYTES < MIB
    assert all(mapped[NUM_BLOCKS // 2 :])


def _is_mapped(block: int) -> bool:
    """True if ``free`` will unmap it: the second bit of the size that glibc keeps in front."""
    return bool(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2)
