"""Chooses Triton's interpreter where there is no GPU, before any test file imports triton."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.foreign_warnings import FOREIGN

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", FOREIGN)


@pytest.fixture
def rigs() -> Iterator[list[Any]]:
    """What a test opens and appends here is closed at its end."""
    opened: list[Any] = []
    yield opened
    for rig in opened:
        rig.close()
