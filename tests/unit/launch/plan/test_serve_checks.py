"""``engine.hot_codec``: what is refused before the start, and what the plan makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.errors import UsageError
from launch.model import Model
from launch.plan.serve_checks import check_hot_codec
from launch.settings.effective_settings import EffectiveSettings, effective_settings
from launch.settings.fields import Value

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
WINDOWS = {
    **LLAMA,
    "model_type": "gemma3_text",
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}


def settings(tmp_path: Path, **values: object) -> EffectiveSettings:
    fields = {"engine.kind": "mlx", "engine.hot_codec": "tq3", "store.codec": "tq3", **values}
    layer = {name.replace("__", "."): Value(value, "test") for name, value in fields.items()}
    return effective_settings([layer], {"HOME": str(tmp_path)})


def model(tmp_path: Path, content: dict[str, object]) -> Model:
    (tmp_path / "config.json").write_text(json.dumps(content))
    return Model(str(tmp_path), "m", tmp_path)


def test_a_plain_model_on_mlx_may(tmp_path):
    check_hot_codec(settings(tmp_path), model(tmp_path, LLAMA))
    check_hot_codec(settings(tmp_path), Model("not/here-yet", "m", None))
    for codec in ("dense3", "auto"):
        check_hot_codec(settings(tmp_path, store__codec=codec), model(tmp_path, LLAMA))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"engine__kind": "vllm"}, "only the mlx engine"),
        ({"engine__kind": "fake"}, "only the mlx engine"),
        ({"store__codec": "raw"}, "kept cold by tq3, not by raw"),
        ({"store__disk_codec": "tq4"}, "kept cold by tq3, not by tq4"),
        ({"engine__hot_codec": "tq4"}, "kept cold by tq4, not by tq3"),
    ],
)
def test_settings_that_cannot_be_followed_end_in_a_sentence(tmp_path, values, why):
    with pytest.raises(UsageError, match=why) as refused:
        check_hot_codec(settings(tmp_path, **values), model(tmp_path, LLAMA))
    assert str(refused.value).startswith("engine.hot_codec = tq")
    check_hot_codec(settings(tmp_path, **{**values, "engine__hot_codec": ""}), model(tmp_path, {}))


def test_a_model_with_windows_is_refused(tmp_path):
    with pytest.raises(UsageError, match="only plain KV caches"):
        check_hot_codec(settings(tmp_path), model(tmp_path, WINDOWS))
