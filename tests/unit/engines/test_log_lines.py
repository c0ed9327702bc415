"""An engine's log lines, written there and read here."""

from __future__ import annotations

import logging
import sys

import pytest

from engines.log_lines import LevelAndWords, log_as, read_line


def record(name: str, message: str, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, message, (), exc_info)  # type: ignore


def test_a_written_line_is_read() -> None:
    line = LevelAndWords().format(record("engines.mlx_worker.owner", "too\nlate"))
    assert read_line(line) == (logging.WARNING, "too | late")
    line = LevelAndWords().format(record("mlx_lm", "slow"))  # libraries are named
    assert read_line(line) == (logging.WARNING, "mlx_lm: slow")


def test_a_long_traceback_keeps_its_end_on_one_line() -> None:
    try:
        raise ValueError("x" * 10_000 + " the end")
    except ValueError:
        line = LevelAndWords().format(record("engines", "failed", sys.exc_info()))
    assert line.startswith("WARNING failed | ") and line.endswith("the end")
    assert "\n" not in line and len(line) < 4096


@pytest.mark.parametrize(
    ("line", "level", "words"),
    [
        ("(Core pid=7) ERROR 11-21 00:51:39 [a.py:1] no", 40, "(Core pid=7) [a.py:1] no"),
        ("INFO 11-21 00:51:39 [a.py:1] yes", 20, "[a.py:1] yes"),
        ("INFO:     Started server process", 20, "Started server process"),
        ("WARNINGS are no level", 20, "WARNINGS are no level"),
        ("Fetching 7 files", 20, "Fetching 7 files"),
    ],
)  # fmt: skip
def test_lines_of_others(line: str, level: int, words: str) -> None:
    assert read_line(line) == (level, words)


def test_our_lines_are_written_as_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    host, ours = logging.getLogger("a-host"), logging.getLogger("engines")
    monkeypatch.setattr(host, "handlers", [Lines()])
    monkeypatch.setattr(ours, "handlers", [])
    for name in ("kvstore", "thermocline"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [Lines()])  # the operator's
    level = ours.level
    host.setLevel(logging.INFO)
    try:
        log_as("a-host")
        log_as("a-host")
        logging.getLogger("engines.calibration.gate").info("sessions are packed")
        logging.getLogger("engines.calibration.gate").debug("a detail")
    finally:
        ours.setLevel(level)
    assert lines == ["sessions are packed"]
