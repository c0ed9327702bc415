"""vLLM's own server as the gateway starts it, for all tests of this folder that ask one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.conftest import FAULTY_RAW, model_path
from tests.vllm.rig.event_reader import EventReader
from tests.vllm.rig.faulty_codec import Faults
from tests.vllm.rig.served import Served

STEP_TOKENS = 512


@pytest.fixture(scope="session")
def event_reader() -> Iterator[EventReader]:
    """Reads the events of ``vllm_server``."""
    reader = EventReader()
    yield reader
    reader.close()


@pytest.fixture(scope="session")
def vllm_server(
    faults: Faults, event_reader: EventReader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    options = ("--max-num-batched-tokens", str(STEP_TOKENS))
    options += ("--kv-events-config", event_reader.config())
    served = Served(tmp_path_factory.mktemp("server"), FAULTY_RAW, model_path(), *options)
    yield served
    faults.clear()
    served.close()
