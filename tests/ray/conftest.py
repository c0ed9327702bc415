"""Tests with Ray: run with the Python of the environment that has it (.venv-ray)."""

from __future__ import annotations

import os

import pytest

from tests.foreign_warnings import FOREIGN

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("ray", reason="Ray lives in an environment of its own")
pytest.importorskip("vllm", reason="Ray's environment has vLLM, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", FOREIGN)
