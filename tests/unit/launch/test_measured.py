"""What was measured of a model, found again without an engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engines.calibration.profiles import profile_path, save
from kvstore.codecs.profile import Profile
from kvstore.shapes import KVLayer, KVLayout
from launch.effective import Effective, effective
from launch.measured import recall, remember
from launch.options import layers

FINGERPRINT = "ab" * 16
MEASURED = Profile(FINGERPRINT, KVLayout("float32", (KVLayer(1, 64, 64),)), (), {})


@pytest.fixture
def settings(tmp_path: Path) -> Effective:
    (tmp_path / "config.json").write_text("{}")
    flags = {"--model": str(tmp_path), "--engine": "mlx", "--data-dir": str(tmp_path / "data")}
    found = effective(layers({}, flags=flags), {"HOME": str(tmp_path)})
    save(MEASURED, found.folders.data)
    return found


def test_it_is_found_for_the_model_as_it_was(settings: Effective, tmp_path: Path) -> None:
    assert recall(settings) is None  # nobody has said yet that this model is the one
    remember(settings, FINGERPRINT)
    found = recall(settings)
    assert found is not None and found.fingerprint == FINGERPRINT
    (tmp_path / "config.json").write_text('{"other": 1}')
    assert recall(settings) is None


def test_a_damaged_one_is_told_of(settings: Effective, caplog: pytest.LogCaptureFixture) -> None:
    remember(settings, FINGERPRINT)
    path = profile_path(settings.folders.data, FINGERPRINT)
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert recall(settings) is None
    assert "measure it again: thermocline calibrate" in caplog.text
