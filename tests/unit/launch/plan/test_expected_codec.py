"""``doctor`` describes the measurement that the first start will make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.calibration.first_order import first_order
from launch.plan.expected_codec import first_measurement
from launch.settings.effective_settings import EffectiveSettings, effective_settings
from launch.settings.fields import Value
from tests.unit.launch.plan.published import GEMMA3_27B, LLAMA_8B

GIB = 1 << 30


def settings_of(folder: Path, config: dict[str, Any]) -> EffectiveSettings:
    (folder / "config.json").write_text(json.dumps(config))
    fields = {
        "engine.kind": "mlx",
        "engine.model": str(folder),
        "engine.hot_bytes": 2 * GIB,
        "store.ram_bytes": GIB,
    }
    layer = {name: Value(value, "test") for name, value in fields.items()}
    return effective_settings([layer], {"HOME": str(folder)})


@pytest.fixture
def effective(tmp_path: Path) -> EffectiveSettings:
    return settings_of(tmp_path, LLAMA_8B)


def test_it_names_the_presets_of_the_engines_own_order(effective):
    outlook = first_measurement(effective)
    order = first_order(effective.settings.store, LLAMA_8B["max_position_embeddings"], "")
    assert outlook.will_be and ", ".join(order.presets) in outlook.text
    assert "26 prompts of 1,000 tokens" in outlook.text


def test_windows_are_learned_and_judged_by_more(tmp_path):
    text = first_measurement(settings_of(tmp_path, GEMMA3_27B)).text
    assert "39 prompts of 1,000 tokens" in text


def test_a_context_too_short_to_pack_is_not_measured(tmp_path):
    short = settings_of(tmp_path, LLAMA_8B | {"max_position_embeddings": 200})
    outlook = first_measurement(short)
    assert not outlook.will_be
    assert "no more than 200 tokens" in outlook.text and "thermocline calibrate" in outlook.text
