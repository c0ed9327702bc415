"""What ``doctor`` says of a measurement to come is what the first start will do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.calibrate.background_run import KEPT_FREE_BYTES
from launch.calibrate.first_calibration import WORK_BYTES, order_beside
from launch.errors import LaunchError
from launch.plan.measurement_outlook import first_measurement, served_bytes
from launch.settings.effective_settings import EffectiveSettings, effective_settings
from launch.settings.fields import Value
from tests.unit.launch.plan.published import LLAMA_8B

GIB = 1 << 30
SERVED = 3 * GIB


@pytest.fixture
def effective(tmp_path: Path) -> EffectiveSettings:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    fields = {
        "engine.kind": "mlx",
        "engine.model": str(tmp_path),
        "engine.hot_bytes": 2 * GIB,
        "store.ram_bytes": GIB,
    }
    layer = {name: Value(value, "test") for name, value in fields.items()}
    return effective_settings([layer], {"HOME": str(tmp_path)})


def test_with_room_it_is_measured_with_the_presets_of_the_order(effective):
    assert served_bytes(effective) == SERVED
    enough = SERVED + WORK_BYTES["mlx"] + KEPT_FREE_BYTES
    outlook = first_measurement(effective, lambda: enough)
    order = order_beside(effective, lambda: enough - SERVED)
    assert outlook.will_be and ", ".join(order.presets) in outlook.text
    assert "hours at most" in outlook.text


def test_without_room_it_says_what_the_first_start_would(effective):
    little = SERVED + WORK_BYTES["mlx"] + KEPT_FREE_BYTES - 1
    with pytest.raises(LaunchError) as refused:
        order_beside(effective, lambda: little - SERVED)
    outlook = first_measurement(effective, lambda: little)
    assert not outlook.will_be
    assert str(refused.value) in outlook.text and "thermocline calibrate" in outlook.text
