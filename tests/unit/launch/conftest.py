"""The command line in this process, and a model that is small enough to plan for."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from launch.cli.main import main
from tests.fields import fields

TINY_LLAMA = fields(
    "model_type=llama hidden_size=256 num_hidden_layers=2 num_attention_heads=4",
    "num_key_value_heads=2 max_position_embeddings=4096",
)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """``run("keys", "new", "bob")`` -> exit code, standard output, standard error."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["thermocline", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    handlers, level = logging.root.handlers[:], logging.root.level
    yield call
    logging.root.handlers[:] = handlers  # `serve` takes the logs of its process
    logging.root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def model(tmp_path):
    """A folder with all that a plan needs."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    (folder / "model.safetensors").write_bytes(b"")
    return folder
