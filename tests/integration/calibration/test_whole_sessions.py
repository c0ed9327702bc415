"""A whole calibration of models with windows and states: learned, measured, and served from."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.calibration.gate.served_codecs import ServedCodecs
from engines.config import CalibrationReport
from engines.mlx_worker.cache.layout import probe
from kvstore.codecs.profile import OF_STATES, OF_WINDOWS, load_profile
from kvstore.config import StoreConfig
from tests.integration.calibration.surveys import small_order, surveyed
from tests.integration.tiny_models import tiny_model, write_model

pytestmark = pytest.mark.mlx


def calibrated(kind: str, data: Path, num_windows: int = 2) -> CalibrationReport:
    folder = data / "model"
    folder.mkdir(exist_ok=True)
    write_model(kind, folder)
    order = small_order("dense3", num_windows=num_windows, data_path=str(data))
    return surveyed(folder, order)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CalibrationReport]:
    """The folder and the report of a calibration, which takes ten seconds."""
    data = tmp_path_factory.mktemp("qwen")
    return data, calibrated("qwen3_next", data)


def served(kind: str, report: CalibrationReport, data: Path, max_kl: float) -> ServedCodecs:
    plan = probe(tiny_model(kind).model)
    assert plan.layout is not None
    config = StoreConfig(max_kl=max_kl, accept_loss=True, codec="dense3")
    return ServedCodecs(config, plan.layout, report.fingerprint, data, states=plan.states)


def test_windows_are_learned_by_themselves(tmp_path: Path) -> None:
    report = calibrated("gemma3_text", tmp_path)
    profile = load_profile(Path(report.profile))
    assert set(profile.learned) == {"dense3", "dense3" + OF_WINDOWS}
    assert len(profile.windows.layers) == 4
    # The layers with windows turn their keys by another base.
    assert None not in (*profile.ropes, *profile.window_ropes)
    row, finer = report.rows
    assert row.preset == "dense3" and row.kl > 0 and row.bits_per_element < 6
    assert finer.preset == "dense3+window4" and finer.kl > 0
    assert row.bits_per_element < finer.bits_per_element
    codecs = served("gemma3_text", report, tmp_path, max_kl=1e9)
    session = codecs.codecs.session
    assert session is not None
    assert session.id == row.codec_id == codecs.report.id
    assert session.windows.id != session.kv.id


def test_every_way_of_states_is_measured_with_the_usual_rows(qwen):
    data, report = qwen
    rows = {x.preset: x for x in report.rows}
    plain, dealt = ("state16", "state8", "state6"), ("dealt6", "dealt5", "dealt4")
    ways = (*plain, *dealt)  # mlx sees the cost of errors
    assert set(rows) == {f"dense3+{x}" for x in ways}
    for names in (plain, dealt):
        by_bits = [rows[f"dense3+{x}"].bits_per_element for x in names]
        assert by_bits == sorted(by_bits, reverse=True)
    profile = load_profile(Path(report.profile))
    assert set(profile.learned) == {"dense3", OF_STATES}
    assert profile.ids[OF_STATES] in rows["dense3+dealt5"].codec_id
    codecs = served("qwen3_next", report, data, max_kl=1e9)
    assert codecs.report.id == rows["dense3+state8"].codec_id  # the meaning of "dense3" alone


def test_sessions_asleep_by_dealt_bits_stay_readable_when_more_is_learned(qwen):
    """By the profile that lies beside the data, which has what errors in states cost."""
    data, first = qwen
    layout, states = load_profile(Path(first.profile)).layout, probe(tiny_model("qwen3_next").model)

    def served_by(codec: str) -> ServedCodecs:
        config = StoreConfig(max_kl=1e9, codec=codec)
        known = (config, layout, first.fingerprint, data)
        return ServedCodecs(*known, states=states.states)

    before = served_by("dense3+dealt5").codecs
    assert before.profile is not None and before.session is not None
    calibrated("qwen3_next", data, num_windows=4)
    after = served_by("auto")
    assert set(before.written_ids) - set(after.codecs.written_ids)
    read = after.opened(before.profile)
    assert read is not None and read.session is not None
    assert read.session.id == before.session.id and read.written_ids == before.written_ids


def test_bits_are_dealt_to_a_state_that_is_all_there_is(tmp_path: Path) -> None:
    report = calibrated("mamba2", tmp_path)
    rows = {x.preset: x for x in report.rows}
    assert {"raw+state8", "raw+dealt6", "raw+dealt4"} <= set(rows)
    assert rows["raw+dealt6"].bits_per_element < rows["raw+state8"].bits_per_element
