"""How much memory a measurement beside the service may take."""

from __future__ import annotations

import pytest

from launch.calibrate.background_run import KEPT_FREE_BYTES
from launch.calibrate.first_calibration import WORK_BYTES, granted_bytes
from launch.errors import LaunchError

WEIGHTS = 8 << 30
LEAST = WEIGHTS + WORK_BYTES


def test_too_little_is_refused() -> None:
    enough = LEAST + KEPT_FREE_BYTES
    assert granted_bytes(WEIGHTS, enough) == LEAST
    with pytest.raises(LaunchError, match="GiB are available"):
        granted_bytes(WEIGHTS, enough - 1)


def test_there_is_more_for_gradients_where_it_is_free() -> None:
    plenty = 1 << 40
    assert granted_bytes(WEIGHTS, plenty) == LEAST + 2 * WEIGHTS
    there = LEAST + WEIGHTS
    assert granted_bytes(WEIGHTS, there) == there - KEPT_FREE_BYTES
