"""Chooses Triton's interpreter where there is no GPU, before any test file imports triton."""

from __future__ import annotations

import os

import pytest

from tests.foreign_warnings import FOREIGN

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", FOREIGN)
