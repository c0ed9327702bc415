"""The picture of a report: it is drawn for all measurements, and it shows all of their names."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from engines.config import CalibrationReport
from kvstore.codecs.quality import Quality
from launch.calibrate.plot import check_output, draw, place_labels, whole_file
from launch.errors import LaunchError, UsageError
from tests.unit.engines.calibration.gate.test_bound import GOOD

pytestmark = pytest.mark.slow  # to draw takes matplotlib seconds


def test_a_path_that_can_never_be_written_is_refused_at_once(tmp_path: Path) -> None:
    check_output("--json", tmp_path / "new.json")
    (tmp_path / "old.json").write_text("{}")
    check_output("--json", tmp_path / "old.json")
    with pytest.raises(UsageError, match=r"--json .*: there is no folder .*nowhere"):
        check_output("--json", tmp_path / "nowhere" / "x.json")
    with pytest.raises(UsageError, match="this is a folder"):
        check_output("--json", tmp_path)
    with pytest.raises(UsageError, match="this is a folder"):
        check_output("--json", Path())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UsageError, match="nothing may be written into"):
            check_output("--json", tmp_path / "x.json")
    finally:
        tmp_path.chmod(0o700)


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    with whole_file(path) as file:
        assert file.suffix == ".json"  # who draws goes by it
        file.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [x.name for x in tmp_path.iterdir()] == ["rows.json"]


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    with pytest.raises(LaunchError, match=r"rows.json cannot be written: .*full"):
        _fill(path, OSError("the disk is full"))
    with pytest.raises(KeyboardInterrupt):
        _fill(path, KeyboardInterrupt())
    assert path.read_text() == "old"
    assert [x.name for x in tmp_path.iterdir()] == ["rows.json"]


def _fill(path: Path, failure: BaseException) -> None:
    with whole_file(path) as file:
        file.write_text("half")
        raise failure


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "rows.json")
    with whole_file(tmp_path / "link.json") as file:
        file.write_text("new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "there" / "rows.json").read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    """As root one could otherwise put a file in the place of /dev/null."""
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    check_output("--json", path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    with whole_file(path) as file:
        file.write_text("rows")
    reader.join(10)
    assert read == ["rows"] and path.is_fifo()


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
