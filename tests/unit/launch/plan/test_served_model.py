"""Models that ``serve`` refuses before the start, and contexts that fit into live KV's budget.

``plan`` and ``doctor`` refuse the same models.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from engines.config import EngineConfig
from engines.kv_budget import alone_bytes, packed_cost
from kvstore.shapes import KVLayer
from launch.doctor import examine
from launch.errors import UsageError
from launch.families.cache_shape import CacheShape, ModelRefused
from launch.families.table import cache_shape
from launch.machine.resources import has_matrix_tiles
from launch.model.find import Model, find_model
from launch.plan.capacity_plan import plan_of
from launch.plan.served_model import (
    HotBudget,
    check_hot_codec,
    check_served,
    hot_budget_of,
    live_dtype,
    served_cache,
)
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


MIB = 1 << 20
SMOLLM2 = CacheShape((KVLayer(3, 64, 64),) * 30)


def budget(
    hot_mib: int,
    shape: CacheShape = SMOLLM2,
    *,
    pays_for_work: bool = True,
    context_is_set: bool = False,
) -> HotBudget:
    return HotBudget(shape, 4, hot_mib * MIB, 8192, pays_for_work, context_is_set)


@pytest.mark.parametrize(
    ("hot_mib", "usable", "sessions"), [(48, 281, 0), (120, 1086, 1), (200, 1982, 2)]
)
def test_work_is_paid_out_of_the_budget_of_mlx(hot_mib, usable, sessions):
    found = budget(hot_mib)
    assert found.longest_context() == usable
    assert found.sessions(1000) == sessions


def test_one_session_is_answered_and_the_others_idle():
    found = budget(300)
    count = found.sessions(1000)
    held = (count - 1) * SMOLLM2.hot_bytes(1000, 4) + alone_bytes(SMOLLM2.cost(4), 1000)
    assert held <= 300 * MIB < held + SMOLLM2.hot_bytes(1000, 4)


def test_a_pool_that_holds_nothing_else_is_divided():
    found = budget(120, pays_for_work=False)
    assert found.sessions(1000) == 120 * MIB // SMOLLM2.hot_bytes(1000, 4)
    assert found.longest_context() == 120 * MIB // SMOLLM2.hot_bytes(1, 4)
    assert found.refusal() == ""


def test_too_little_is_refused_with_the_size_that_is_enough():
    assert "a context of 64 tokens needs 29 MiB while it runs" in budget(28).refusal()
    assert budget(29).refusal() == ""
    assert budget(29).longest_context() >= 64


def test_vllm_needs_room_for_the_context_that_was_context_is_set():
    """It cuts the model's own context to its pool, but ends if it was given a number."""
    assert budget(120, pays_for_work=False).refusal() == ""
    refusal = budget(120, pays_for_work=False, context_is_set=True).refusal()
    assert "one context of 8192 tokens takes 360 MiB" in refusal
    assert "lower engine.max_context" in refusal
    assert budget(360, pays_for_work=False, context_is_set=True).refusal() == ""
    assert "one context of 64 tokens takes 3 MiB" in budget(2, pays_for_work=False).refusal()


def test_vllm_takes_whole_blocks_and_keeps_one_free(tmp_path):
    """Else its worker ends at each start: 26 whole blocks of this pool hold 800 tokens."""
    nbytes = 856 * SMOLLM2.hot_bytes(1, 4)
    pool = HotBudget(SMOLLM2, 4, nbytes, 812, False, True, block_tokens=32)
    assert pool.longest_context() == 800
    assert "one context of 812 tokens takes 38 MiB" in pool.refusal()
    assert dataclasses.replace(pool, wanted_context=800).refusal() == ""
    effective = served_settings(tmp_path, LLAMA, {"engine__kind": "vllm", "engine__hot_codec": ""})
    for widens, usual in ((True, 32), (False, 16)):
        found = hot_budget_of(dataclasses.replace(effective, widens=widens), LLAMA, SMOLLM2)
        assert found.block_tokens == usual


def test_a_session_without_a_cache_divides_nothing_by_zero():
    assert budget(1, CacheShape()).sessions(10) > 0


def test_the_plan_counts_packed_sessions_as_the_engine_does(tmp_path):
    shape = cache_shape(LLAMA)
    plain, packed = (
        hot_budget_of(settings(tmp_path, engine__hot_codec=x), LLAMA, shape) for x in ("", "tq3")
    )
    assert packed.idle_bytes(4096) == packed_cost(shape.growing, 3, 4, 512).idle_bytes(4096)
    assert plain.idle_bytes(4096) > 8 * packed.idle_bytes(4096)  # of float32
    assert packed.sessions(4096) > 4 * plain.sessions(4096)


@pytest.mark.parametrize(
    ("content", "engine", "widens", "expected"),
    [
        ({"torch_dtype": "float16"}, EngineConfig(), False, "float16"),
        ({"dtype": "float32"}, EngineConfig(), False, "float32"),
        ({"text_config": {"dtype": "float16"}}, EngineConfig(), False, "float16"),
        ({"torch_dtype": "int8"}, EngineConfig(), False, "bfloat16"),
        ({}, EngineConfig(), False, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, EngineConfig(), True, "float32"),
        ({"torch_dtype": "bfloat16"}, EngineConfig(dtype="float16"), True, "float16"),
    ],
)
def test_the_dtype_of_the_live_cache(content, engine, widens, expected):
    assert live_dtype(engine, content, widens) == expected


def test_vllm_keeps_latents_on_gpus_and_on_processors_with_matrix_tiles(tmp_path):
    on_vllm = {"engine__hot_codec": "", "engine__kind": "vllm"}
    effective = served_settings(tmp_path, DEEPSEEK_V3, on_vllm)
    on_gpu = dataclasses.replace(effective, widens=False)
    assert served_cache(on_gpu, DEEPSEEK_V3).has_latents
    on_cpu = dataclasses.replace(effective, widens=True)
    if has_matrix_tiles():
        assert served_cache(on_cpu, DEEPSEEK_V3).has_latents
    else:
        with pytest.raises(ModelRefused, match="no prefixes of models with latents"):
            served_cache(on_cpu, DEEPSEEK_V3)


@pytest.mark.parametrize(("flags", "found"), [("fma amx_tile avx", True), ("fma avx", False)])
def test_matrix_tiles_are_read_off_the_flags(tmp_path, flags, found):
    about = tmp_path / "cpuinfo"
    about.write_text(f"flags\t\t: {flags}\n")
    assert has_matrix_tiles(about) is found
    assert not has_matrix_tiles(tmp_path / "none")
