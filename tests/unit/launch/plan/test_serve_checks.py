"""Models that ``serve`` refuses before the start: ``plan`` and ``doctor`` refuse them, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.doctor import examine
from launch.errors import UsageError
from launch.model.find import Model, find_model
from launch.plan.capacity_plan import plan_of
from launch.plan.served_model import check_hot_codec, check_served
from launch.serve.build import build
from launch.settings.effective_settings import EffectiveSettings, effective_settings
from launch.settings.sources import Value
from tests.fields import fields
from tests.unit.launch.plan.published import DEEPSEEK_V3, GEMMA3_27B, MAMBA2_3B, PUBLISHED

LLAMA = fields(
    "model_type=llama num_hidden_layers=30 num_attention_heads=9 num_key_value_heads=3",
    "hidden_size=576 head_dim=64 max_position_embeddings=8192",
)


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
        ({"engine__hot_codec": "tq4"}, "kept cold by tq4, not by tq3"),
    ],
)
def test_settings_that_cannot_be_followed_end_in_a_sentence(tmp_path, values, why):
    with pytest.raises(UsageError, match=why) as refused:
        check_hot_codec(settings(tmp_path, **values), model(tmp_path, LLAMA))
    assert str(refused.value).startswith("engine.hot_codec = tq")
    check_hot_codec(settings(tmp_path, **{**values, "engine__hot_codec": ""}), model(tmp_path, {}))


# Models that serve refuses, with the settings that lead to it: config.json, settings, words.
REFUSED = {
    "a packed live cache of a model with windows": (
        GEMMA3_27B,
        {"store__accept_loss": True},
        "only plain KV caches",
    ),
    "a packed live cache of latents": (DEEPSEEK_V3, {"store__accept_loss": True}, "latent"),
    "a packed live cache on vLLM": (LLAMA, {"engine__kind": "vllm"}, "only the mlx engine"),
    "a cache that mlx_lm cannot batch": (
        {**LLAMA, "model_type": "llama4"},
        {"engine__hot_codec": ""},
        "cannot batch the ChunkedKVCache",
    ),
    "latents with an index on vLLM": (
        {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128},
        {"engine__hot_codec": "", "engine__kind": "vllm"},
        "the keys of an index",
    ),
    "states alone on vLLM": (
        MAMBA2_3B,
        {"engine__hot_codec": "", "engine__kind": "vllm"},
        "no layer of the model keeps all tokens",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_plan_and_doctor_refuse_the_same_models_as_serve_in_its_words(tmp_path, case):
    content, values, words = REFUSED[case]
    effective = served_settings(tmp_path, content, values)
    model = find_model(str(tmp_path), tmp_path)
    with pytest.raises(UsageError, match=words) as checks:
        check_served(effective, model)
    if effective.engine_kind == "mlx":  # it asks first whether the engine is installed
        pytest.importorskip("mlx_lm")
        with pytest.raises(UsageError) as serves, build(effective, {}):
            raise AssertionError("it was served")
        assert str(serves.value) == str(checks.value)
    with pytest.raises(UsageError) as plans:
        plan_of(effective, "1024")
    (doctors,) = (x for x in examine(effective, {}) if x.about == "model")
    assert (doctors.verdict, doctors.text) == ("failure", str(checks.value))
    assert str(plans.value) == str(checks.value)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
@pytest.mark.parametrize("kind", ["mlx", "vllm"])
def test_a_planned_model_passes_the_checks_of_serve(tmp_path, name, kind):
    effective = served_settings(
        tmp_path,
        PUBLISHED[name],
        {"engine__kind": kind, "engine__hot_codec": "", "engine__hot_bytes": 64 << 30},
    )
    try:
        plan = plan_of(effective, "1024,32768")
    except UsageError:
        assert kind == "vllm"  # which cannot keep latents, or nothing but states
        return
    check_served(effective, find_model(str(tmp_path), tmp_path))
    assert not any("will refuse" in x for x in plan.notes)
    for context in plan.contexts:
        assert {x.tier for x in context.served} == {"ram", "disk"}


def served_settings(tmp_path: Path, content: dict[str, object], values: dict[str, object]):
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").touch()
    chosen = {"store__codec": "auto", "engine__model": str(tmp_path), **values}
    return settings(tmp_path, data_dir=str(tmp_path / "data"), **chosen)
