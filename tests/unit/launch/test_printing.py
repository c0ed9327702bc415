"""Files that commands write: whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from launch.errors import LaunchError, UsageError
from launch.printing import check_output, print_table, whole_file


def test_lines_of_a_table_end_with_their_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("about", "finding"), [("a", "short"), ("b", "of several words"), ("c", "")])
    lines = ["about  finding", "a      short", "b      of several words", "c"]
    assert capsys.readouterr().out.splitlines() == lines


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
