"""vLLM itself reports whether a model sees images, by its class and by its settings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM lives in an environment of its own")

from transformers import Qwen2_5_VLConfig
from vllm.config import ModelConfig

from engines.vllm_plugin.scheduler.welcome import sees_images
from tests.vllm.conftest import model_path


def test_a_model_of_text_sees_nothing() -> None:
    assert not sees_images(ModelConfig(model=model_path(), max_model_len=512))
    assert not sees_images(object())


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="models that see need torchvision"
)
def test_a_model_sees_images_unless_its_limit_is_zero(tmp_path: Path) -> None:
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(model_path()) / name).read_bytes())
    for limit, sees in (({}, True), ({"image": 2}, True), ({"image": 0}, False)):
        made = ModelConfig(
            model=str(tmp_path), max_model_len=512, dtype="float32", limit_mm_per_prompt=limit
        )
        assert sees_images(made) is sees
