"""The picture of a report: it is drawn for all measurements, and it shows all of their names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.drawing import draw, place_labels
from engines.config import CalibrationReport
from kvstore.codecs.quality import Quality
from tests.unit.engines.calibration.gate.test_bound import GOOD

pytestmark = pytest.mark.slow  # to draw takes matplotlib seconds


def row(preset: str, bits: float, **changes: object) -> Quality:
    return msgspec.structs.replace(GOOD, preset=preset, bits_per_element=bits, **changes)


def drawn(folder: Path, *rows: Quality) -> str:
    report = CalibrationReport(fingerprint="f", engine="e", dtype="float32", rows=rows)
    draw(report, folder / "picture.svg")
    return (folder / "picture.svg").read_text()


def test_presets_stand_in_it(tmp_path: Path) -> None:
    found = drawn(tmp_path, row("tq3", 3.25), row("manthan", 3.5), row("fp8", 8), row("max", 0.8))
    groups = ("ours", "usual elsewhere", "of the literature", "Gaussian bound")
    for word in ("tq3", "manthan", "fp8", "max", *groups):
        assert f"<!-- {word}" in found, word


@pytest.mark.parametrize("rows", [(), (row("raw", 32.0, error_k=0.0, error_v=0.0, kl=0.0),)])
def test_nothing_to_draw(tmp_path: Path, rows: tuple[Quality, ...]) -> None:
    assert "<!-- raw" not in drawn(tmp_path, *rows)


def test_names_do_not_hide_each_other() -> None:
    axes = Figure().subplots()
    points = [(i / 200, i / 200) for i in range(8)]
    axes.scatter(*zip(*points, strict=True))
    axes.set(xlim=(-1, 1), ylim=(-1, 1))
    place_labels(axes, [f"name {i}" for i in range(8)], points)
    words = [Text.get_window_extent(x) for x in axes.texts]
    assert len(words) == 8
    assert not any(a.overlaps(b) for i, a in enumerate(words) for b in words[:i])
