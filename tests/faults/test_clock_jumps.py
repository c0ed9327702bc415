"""The clock of the wall jumps under a whole server: sessions sleep and wake to the same tokens."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.stacks.product_stack import MIB, Client, Stack, client_of, prose
from tests.integration.tiny_models import write_model

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the shifted clock"),
]

DAY_S = 86_400
JUMPS = (0, DAY_S, -DAY_S, 400 * DAY_S, -400 * DAY_S, 0)
SESSIONS = ("one", "two", "three")
SETTINGS = {
    "engine": {"kind": "mlx", "hot_bytes": 64 * MIB},
    "store": {"codec": "raw", "ram_bytes": 64 * MIB, "disk_bytes": 256 * MIB},
    "scheduler": {"idle_after_s": 3600.0},
}


class ShiftedClock:
    """A clock that every process with ``environment`` has in common."""

    def __init__(self, folder: Path) -> None:
        library = folder / "shifted_clock.so"
        source = Path(__file__).with_name("shifted_clock.c")
        build = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
        subprocess.run(build, check=True)
        self._file = folder / "offset"
        self.shift(0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(self._file)}

    def shift(self, seconds: int) -> None:
        """Be so far from the time, from now on."""
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(descriptor, struct.pack("q", seconds), 0)
        os.close(descriptor)


async def talk(client: Client, clock: ShiftedClock, jumps: Sequence[int]) -> list[tuple[str, str]]:
    """A question to each session after each jump; returns the answers and their cache sources."""
    histories = {name: [{"role": "system", "content": prose(name, 60)}] for name in SESSIONS}
    came: list[tuple[str, str]] = []
    for turn, jump in enumerate(jumps):
        clock.shift(jump)
        for number, name in enumerate(SESSIONS):
            histories[name].append({"role": "user", "content": prose(f"{name} {turn}", 20)})
            reply = await client.chat(histories[name], name)
            assert reply.ok, reply
            came.append((reply.text, reply.cache.partition(";")[0]))
            histories[name].append({"role": "assistant", "content": reply.text})
            if (number + turn) % 3 == 0:
                where = {"tier": "disk"} if turn % 2 else {}
                await client.post(f"/v1/sessions/{name}/demote", where)
            clock.shift(-jump)  # and once more, between two turns
    listed = await client.get("/v1/sessions")
    assert {x["id"] for x in listed["data"]} == set(SESSIONS)
    return came


async def test_the_clock_jumps_under_a_server(tmp_path: Path) -> None:
    model, clock = tmp_path / "model", ShiftedClock(tmp_path)
    write_model("llama", model)
    settings = {**SETTINGS, "engine": {**SETTINGS["engine"], "model": str(model)}}
    seen = clock_of_a_child(clock)
    clock.shift(DAY_S)
    assert clock_of_a_child(clock) - seen > DAY_S - 600  # the clock is one that can be shifted
    clock.shift(0)
    with Stack(settings, tmp_path / "data", environment=clock.environment) as stack:
        engine = stack.engine
        async with client_of(stack) as client:
            calm = await talk(client, clock, (0,) * len(JUMPS))
            for name in SESSIONS:
                await client.delete(f"/v1/sessions/{name}")
            jumping = await talk(client, clock, JUMPS)
        assert stack.engine == engine and engine.status() != psutil.STATUS_ZOMBIE
        assert "Traceback" not in stack.log.read_text()
    assert jumping == calm
    assert {"hot", "cold-ram", "cold-disk"} <= {source for _, source in calm}


def clock_of_a_child(clock: ShiftedClock) -> float:
    command = [sys.executable, "-c", "import time; print(time.time())"]
    env = {**os.environ, **clock.environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_what_is_stored_goes_by_its_age_and_no_time_is_waited_for(tmp_path: Path) -> None:
    """Stored objects expire by the wall's clock alone; one that runs back keeps them."""
    asyncio.run(_stored(tmp_path))


async def _stored(tmp_path: Path) -> None:
    clock = ShiftedClock(tmp_path)
    settings = {"engine": {"kind": "fake"}, "store": {"disk_bytes": 0}}
    with Stack(settings, tmp_path / "data", environment=clock.environment) as stack:
        async with client_of(stack) as client:
            asked = {"model": client.model, "input": "hello"}
            for jump in (0, -400 * DAY_S, 20 * DAY_S, -DAY_S):
                clock.shift(jump)
                made = await client.post("/v1/responses", asked)
                shown = await client.get(f"/v1/responses/{made['id']}")
                assert shown["id"] == made["id"], (jump, shown)
                more = await client.post(
                    "/v1/responses", {**asked, "previous_response_id": made["id"]}
                )
                assert more["status"] == "completed", (jump, more)
