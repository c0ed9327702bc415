from __future__ import annotations

from pathlib import Path

import pytest

from engines.mlx_worker.model.loading import Vocabulary
from tests.tiny_tokenizer import THINKING, TOOLS, tiny_tokenizer

LOGITS = 410  # wider than the tokenizer, as with padded models


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return _vocabulary(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return _vocabulary(tmp_path_factory.mktemp("tools"), TOOLS)


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return _vocabulary(tmp_path_factory.mktemp("thinking"), THINKING)


def _vocabulary(folder: Path, template: str | None = None) -> Vocabulary:
    if template is None:
        return Vocabulary(tiny_tokenizer(folder), LOGITS)
    return Vocabulary(tiny_tokenizer(folder, template, markers=True), LOGITS)
