"""The product as a user starts it: one gateway, one engine, the sample model."""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
import pytest

from benchmarks.stacks.product_stack import MIB, Stack
from engines.vllm_environment.environment import inspect_environment
from launch.machine.installation import find_python

SETTINGS = {
    "engine": {"hot_bytes": 1024 * MIB},
    "store": {"codec": "raw", "ram_bytes": 256 * MIB, "disk_bytes": 1024 * MIB},
    "scheduler": {"idle_after_s": 3600.0},
}


def python_with_vllm() -> str:
    """Skip where there is none: a test, or a module of them."""
    python = find_python(os.environ.get("THERMOCLINE_ENGINE__VLLM__PYTHON", ""))
    if not python or inspect_environment(python).problem:
        pytest.skip("no vLLM here; run: bash launch/install.sh vllm", allow_module_level=True)
    return python


@pytest.fixture(scope="session")
def sample_stack() -> Iterator[Stack]:
    with Stack(SETTINGS) as running:
        yield running


@pytest.fixture(scope="session")
def client(sample_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{sample_stack.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="session")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def vllm_stack() -> Iterator[Stack]:
    """Gateway and vLLM, with the exact codec; a start takes a minute or two."""
    python = python_with_vllm()
    settings = {
        "engine": {
            "kind": "vllm",
            "vllm.python": python,
            "hot_bytes": 256 * MIB,
            "max_context": 2048,
            "dtype": "float32",
        },
        "store": {"codec": "raw", "ram_bytes": 512 * MIB, "disk_bytes": 1024 * MIB},
        "scheduler": {"idle_after_s": 3600.0},
    }
    with Stack(settings, start_timeout_s=900.0) as running:
        yield running
