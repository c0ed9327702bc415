"""Both sides of the plug-in, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.engines.vllm_plugin.hub_engine import Engine
from tests.unit.engines.vllm_plugin.scheduler.scheduler_bench import Bench, new_bench


@pytest.fixture
def bench() -> Bench:
    return new_bench()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()
