"""A model's measurements, found again without an engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engines.calibration.gate.profiles import profile_path, save
from kvstore.codecs.profile import Profile
from kvstore.shapes import KVLayer, KVLayout
from launch.calibrate.profile_notes import find_profile, write_note
from launch.cli.options import layers
from launch.settings.effective_settings import EffectiveSettings, effective_settings

FINGERPRINT = "ab" * 16
MEASURED = Profile(FINGERPRINT, KVLayout("float32", (KVLayer(1, 64, 64),)), (), {})


@pytest.fixture
def settings(tmp_path: Path) -> EffectiveSettings:
    (tmp_path / "config.json").write_text("{}")
    flags = {"--model": str(tmp_path), "--engine": "mlx", "--data-dir": str(tmp_path / "data")}
    found = effective_settings(layers({}, flags=flags), {"HOME": str(tmp_path)})
    save(MEASURED, found.folders.data)
    return found


def test_it_is_found_for_the_model_as_it_was(settings: EffectiveSettings, tmp_path: Path):
    assert find_profile(settings) is None  # no note says yet that this model is the one
    write_note(settings, FINGERPRINT)
    assert find_profile(settings).fingerprint == FINGERPRINT
    (tmp_path / "config.json").write_text('{"other": 1}')
    assert find_profile(settings) is None


def test_a_damaged_one_is_reported(settings: EffectiveSettings, caplog: pytest.LogCaptureFixture):
    write_note(settings, FINGERPRINT)
    path = profile_path(settings.folders.data, FINGERPRINT)
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert find_profile(settings) is None
    assert "measure it again: thermocline calibrate" in caplog.text
