"""Memory of a model that is not loaded is lent to the others, with real engines that are killed."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.integration.launch.test_several_models import chat, start, states
from tests.integration.tiny_models import write_model
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.mlx, pytest.mark.timeout(400)]

MIB = 1 << 20
TOML = """
[engine]
hot_bytes = "64MiB"
[store]
ram_bytes = "32MiB"
disk_bytes = "256MiB"
[[engines]]
name = "always"
kind = "mlx"
model = "{model}"
[[engines]]
name = "sometimes"
kind = "mlx"
model = "{model}"
load = "on-demand"
unload_after_s = 2
"""


def capacities(url: str) -> dict[str, int]:
    """The bytes of live KV that each engine which is there says it may use."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    name = "thermocline_engine_hot_capacity_bytes{model="
    found = (x.removeprefix(name).split("} ") for x in lines if x.startswith(name))
    return {model.strip('"'): int(float(value)) for model, value in found}


def test_memory_is_lent_and_given_back_although_engines_are_killed(tmp_path):
    (tmp_path / "tiny").mkdir()
    write_model("llama", tmp_path / "tiny")
    server = start(tmp_path, TOML.format(model=tmp_path / "tiny"))
    most: list[int] = []

    def has(model: str, nbytes: int) -> bool:
        found = capacities(server.url)
        most.append(sum(found.values()))
        return found.get(model) == nbytes

    try:
        assert chat(server, "always", "a", "hello")[0] == 200
        until(lambda: has("always", 64 * MIB))
        assert chat(server, "sometimes", "s", "hello")[0] == 200
        assert has("always", 32 * MIB)
        until(lambda: has("always", 64 * MIB))  # the other one was unloaded meanwhile
        assert states(server)["sometimes"] == "unloaded"

        children = psutil.Process(server.process.pid).children()
        (engine,) = [x for x in children if "engines.mlx_worker" in " ".join(x.cmdline())]
        with ThreadPoolExecutor(1) as pool:
            loads = pool.submit(chat, server, "sometimes", "s", "hello", "x", "again")
            engine.kill()  # while its memory is asked back
            until(lambda: has("sometimes", 32 * MIB) or loads.done())
            assert loads.result()[0] == 200
        until(lambda: has("always", 64 * MIB))
        assert chat(server, "always", "a", "hello", "x", "again")[0] == 200
        assert max(most) <= 64 * MIB
    finally:
        server.stop()
