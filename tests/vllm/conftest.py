"""Real-engine tests: run with the Python of the environment that has vLLM."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.vllm_plugin.process.command import SCHEDULER
from kvstore.config import StoreConfig
from tests.foreign_warnings import FOREIGN
from tests.vllm.rig.device import runs_models
from tests.vllm.rig.engine import RealEngine, opened
from tests.vllm.rig.faulty_codec import Faults
from tests.vllm.rig.tiny_model import VOCAB, write_tiny_model

pytest.importorskip("torch", reason="vLLM lives in an environment of its own")
if not runs_models():  # before vLLM looks for its platform
    sys.path.append(str(Path(__file__).parent / "rig" / "without_device"))
pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

MODEL_VARIABLE = "SAMPLE_MODEL"
NUM_TOKENS = 600
FAULTY_RAW = "tests.vllm.rig.faulty_codec:FaultyRaw"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", FOREIGN)


def model_path() -> str:
    """The sample model's folder, which the gateway's environment makes."""
    cached = Path.home() / ".cache/thermocline/models/SmolLM2-135M-Instruct"
    return os.environ.get(MODEL_VARIABLE) or str(cached)


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def shared_engine(faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """Of a step's 256 tokens a prompt gets 64 while others wait: four could run side by side."""
    store = StoreConfig(codec=FAULTY_RAW, ram_bytes=1 << 30, disk_bytes=1 << 30)
    steps = {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 64}
    steps |= {"scheduler_cls": SCHEDULER}
    with opened(tmp_path_factory.mktemp("shared"), write_tiny_model, store, **steps) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: RealEngine, faults: Faults) -> Iterator[RealEngine]:
    """The shared engine, with an empty prefix cache; no block may be held after the test."""
    assert shared_engine.forget_local()
    yield shared_engine
    faults.clear()
    assert shared_engine.forget_local(), "blocks are held after the test"


@pytest.fixture(scope="module")
def sessions(request: pytest.FixtureRequest) -> list[list[int]]:
    """Six prompts that share nothing, also not with those of another file."""
    generator = random.Random(request.module.__name__)
    return [[generator.randrange(10, VOCAB) for _ in range(NUM_TOKENS)] for _ in range(6)]
