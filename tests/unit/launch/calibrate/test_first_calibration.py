"""How much memory a measurement beside the service may take."""

from __future__ import annotations

import pytest

from launch.calibrate.background_run import KEPT_FREE_BYTES
from launch.calibrate.first_calibration import WORK_BYTES, granted_bytes
from launch.errors import LaunchError

WEIGHTS = 8 << 30
LEAST = {kind: WEIGHTS + work for kind, work in WORK_BYTES.items()}


@pytest.mark.parametrize("kind", WORK_BYTES)
def test_too_little_is_refused(kind: str) -> None:
    enough = LEAST[kind] + KEPT_FREE_BYTES
    assert granted_bytes(kind, WEIGHTS, enough) == LEAST[kind]
    with pytest.raises(LaunchError, match="GiB are available"):
        granted_bytes(kind, WEIGHTS, enough - 1)


def test_on_vllm_there_is_more_for_gradients_where_it_is_free() -> None:
    plenty = 1 << 40
    assert granted_bytes("vllm", WEIGHTS, plenty) == LEAST["vllm"] + 2 * WEIGHTS
    assert granted_bytes("mlx", WEIGHTS, plenty) == LEAST["mlx"]
    there = LEAST["vllm"] + WEIGHTS
    assert granted_bytes("vllm", WEIGHTS, there) == there - KEPT_FREE_BYTES
