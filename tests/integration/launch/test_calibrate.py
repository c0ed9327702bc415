"""``thermocline calibrate`` as a user runs it, on a tiny model with a tokenizer of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvstore.codecs.profile import load_profile
from tests.command_line import thermocline
from tests.integration.tiny_models import write_model

# Learning reads dozens of texts, so a busy machine takes minutes; this only ends a hanging command.
HANGS_AFTER_S = 800
pytestmark = [pytest.mark.mlx, pytest.mark.timeout(HANGS_AFTER_S + 60)]

TEXT = "She sells sea shells by the sea shore, and he counts 12345 of them every day. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "tiny").mkdir()
    write_model("llama", folder / "tiny")
    (folder / "text.txt").write_text(TEXT)
    return folder


def command(folder: Path, *arguments: str) -> list[str]:
    start = [sys.executable, "-m", "launch", "calibrate", "--model", str(folder / "tiny")]
    return [*start, "--eval-text", str(folder / "text.txt"), "--contexts", "192", *arguments]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patched:
        for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
            patched.setenv(name, str(folder))
        return thermocline(*command(folder, *arguments)[3:])


def test_a_table_its_rows_as_json_and_a_profile_that_is_kept(folder: Path) -> None:
    out = folder / "rows.json"
    done = run(folder, "--presets", "raw,tq4,dense3,tq3", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout and "tq3" in done.stdout
    report = json.loads(out.read_text())
    rows = {row["preset"]: row for row in report["rows"]}
    assert set(rows) == {"raw", "tq4", "dense3", "tq3"}
    assert rows["raw"]["kl"] == 0 < rows["tq4"]["kl"] < rows["tq3"]["kl"]
    assert rows["tq3"]["context"] == 192 and rows["tq3"]["bits_per_element"] < 3.6
    profile = load_profile(Path(report["profile"]))
    assert set(profile.learned) == {"dense3"}
    assert profile.fingerprint == report["fingerprint"] == Path(report["profile"]).stem
    # On a random model there is little to learn; it must not do harm.
    assert rows["dense3"]["kl"] < 2 * rows["tq3"]["kl"]
    assert rows["dense3"]["bits_per_element"] < rows["tq3"]["bits_per_element"] + 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--contexts", "2k"), "--contexts 2k: write numbers"),
        (("--contexts", "64"), "at least 128 tokens"),
        (("--contexts", "7000"), "no text has 7256 tokens; give longer ones by --eval-text"),
        (("--json", "nowhere/rows.json"), "there is no folder"),
        (("--text", "nowhere.txt"), "nowhere.txt is no regular file"),
    ],
)
def test_what_cannot_be_done(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run(folder, *arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_profile_that_cannot_be_kept_costs_no_figures(folder: Path) -> None:
    out = folder / "rows.json"
    arguments = ("--presets", "tq3", "--json", str(out))
    assert run(folder, *arguments).returncode == 0
    profile = Path(json.loads(out.read_text())["profile"])
    profile.unlink()
    profile.mkdir()  # as good as a full disk
    out.unlink()
    done = run(folder, *arguments)
    assert done.returncode == 1 and "what was learned is not kept" in done.stderr
    assert "tq3" in done.stdout and json.loads(out.read_text())["rows"]


def test_a_data_folder_that_cannot_be_is_said_before_anything_is_measured(folder: Path) -> None:
    data = folder / "in-the-way"
    data.write_text("a file")
    done = run(folder, "--presets", "tq3", "--set", f"data_dir={data}")
    assert done.returncode == 1 and f"nothing can be kept in {data}" in done.stderr
    assert "measured" not in done.stderr.partition("nothing")[0]


def test_nothing_is_judged_by_what_it_was_learned_from(folder: Path) -> None:
    done = run(folder, "--text", str(folder / "text.txt"))
    assert done.returncode == 2 and "cannot serve both --text and --eval-text" in done.stderr


def test_a_killed_command_leaves_no_program_running(folder: Path) -> None:
    with subprocess.Popen(
        command(folder), env=environment(folder), stderr=subprocess.DEVNULL
    ) as started:
        me = psutil.Process(started.pid)
        child = _program(me)
        started.kill()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


def test_ctrl_c_ends_both_without_a_word_about_our_code(folder: Path) -> None:
    """Even while the program is still importing, which takes seconds."""
    with subprocess.Popen(
        command(folder), env=environment(folder), stderr=subprocess.PIPE, start_new_session=True
    ) as started:
        child = _program(psutil.Process(started.pid))
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
        _, said = started.communicate(timeout=60)
    psutil.wait_procs([child], timeout=60)
    assert started.returncode == 130 and not child.is_running()
    assert b"Traceback" not in said


def test_an_engine_that_ends_while_it_measures_is_reported(folder: Path) -> None:
    with subprocess.Popen(
        command(folder), env=environment(folder), stderr=subprocess.PIPE, text=True
    ) as started:
        child = _program(psutil.Process(started.pid))
        assert started.stderr is not None
        while "measuring: " not in started.stderr.readline():
            assert started.poll() is None
        child.kill()
        _, said = started.communicate(timeout=60)
    assert started.returncode == 1
    assert "error: the engine ended while it measured" in said and "Traceback" not in said


def _program(parent: psutil.Process) -> psutil.Process:
    """Once it runs. Before it, the parent tries libraries out in children that end at once."""
    while parent.is_running():
        for child in parent.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "engines.mlx_worker" in child.cmdline():
                    return child
        time.sleep(0.05)
    raise AssertionError("it ended before it had started a program")
