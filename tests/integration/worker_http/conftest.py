"""A stage for every test of the worker's HTTP side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker_http.stage import LOGITS, Open, staged
from tests.tiny_tokenizer import PLAIN, tiny_tokenizer
from tests.toy_owner import ToyOwner


@pytest.fixture
def toy(tmp_path: Path) -> Open:
    def open_stage(template: str = PLAIN, keepalive_s: float = 5.0, **options: Any) -> Any:
        tokenizer = tiny_tokenizer(tmp_path, template, markers=template != PLAIN)
        return staged(ToyOwner(LOGITS, **options), tokenizer, keepalive_s)

    return open_stage
