"""``calibrate --url`` reads the reports of a server that measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from engines.config import CalibrationReport
from engines.wire import CodecReport, MeasurementEnd
from kvstore.codecs.quality import Quality
from launch.cli.calibrate import LOOK_EVERY_S, SILENCE_S, RowPrinter, measure_served
from launch.errors import LaunchError
from launch.remote.server import Remote
from tests.unit.engines.calibration.gate.test_bound import GOOD

OLD = MeasurementEnd(1.0)
ROW = msgspec.structs.replace(GOOD, preset="tq4", context=512, bits_per_element=4.3, kl=0.005)


class Reporting(Remote):
    """A server that says one thing after the other, and the last for ever; None = no answer."""

    def __init__(self, *said: CodecReport | None) -> None:
        super().__init__("http://127.0.0.1:9")
        self._said: Iterator[CodecReport | None] = iter(said)
        self._last: CodecReport | None = None
        self.now_s = 0.0

    def codec(self) -> CodecReport | None:
        self._last = next(self._said, self._last)
        if self._last is None:
            raise LaunchError("it does not answer")
        return self._last

    def measure(self) -> str:
        return "measuring: it begins"

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def report(progress: str = "", ended: MeasurementEnd | None = None, *rows: Quality) -> CodecReport:
    return CodecReport(name="raw", progress=progress, ended=ended, rows=rows)


def run(
    server: Reporting, on_rows: Callable[[Sequence[Quality]], None] = lambda rows: None
) -> tuple[list[str], tuple[Quality, ...]]:
    printed: list[str] = []
    found = measure_served(
        server,
        printed.append,
        on_rows,
        clock=lambda: server.now_s,
        sleep=server.sleep,
    )
    return printed, found.rows


def test_progress_is_printed_and_rows_are_found() -> None:
    new = report("", MeasurementEnd(2.0), ROW)
    server = Reporting(
        report(), report("1 of 2"), report("1 of 2"), None, report("2 of 2"), report(), new
    )
    assert run(server) == (["measuring: it begins", "1 of 2", "2 of 2"], (ROW,))


def test_figures_of_an_older_measurement_are_not_taken_for_new() -> None:
    server = Reporting(report("", OLD, ROW), report("1 of 2", None, ROW), report("", OLD, ROW))
    with pytest.raises(LaunchError, match="restarted"):
        run(server)
    assert SILENCE_S < server.now_s < 2 * SILENCE_S + LOOK_EVERY_S


def test_a_measurement_that_failed_says_why() -> None:
    failed = MeasurementEnd(2.0, "No space left on device")
    server = Reporting(report("", OLD, ROW), report("", failed, ROW))
    with pytest.raises(LaunchError, match="No space left"):
        run(server)
    assert server.now_s == LOOK_EVERY_S


def test_rows_are_printed_as_they_come_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    early = msgspec.structs.replace(ROW, preset="dense3", is_early=True)
    max_row = msgspec.structs.replace(ROW, preset="max")
    working = [
        msgspec.structs.replace(report("1 of 2"), found=x) for x in ((), (early,), (ROW,), (ROW,))
    ]
    server, printer = Reporting(report(), *working, report("", OLD, ROW, max_row)), RowPrinter()
    shown: list[str] = []

    def print_rows(rows: Sequence[Quality]) -> None:
        printer.print_rows(rows)
        shown.append(capsys.readouterr().out)

    found = run(server, print_rows)[1]
    printer.print_report(CalibrationReport(fingerprint="", engine="", dtype="", rows=found))
    last = capsys.readouterr().out
    heading, row = "".join(shown).splitlines()
    assert heading.startswith("preset") and row.split()[:4] == ["tq4", "512", "4.300", "0.00500"]
    assert shown[2] and not any(shown[:2] + shown[3:])
    assert last.startswith("max ") and len(heading) == len(row.rstrip()) + len("  of Gaussian")


def test_an_engine_without_codecs() -> None:
    with pytest.raises(LaunchError, match="no codecs"):
        run(Reporting(report(), report("", MeasurementEnd(2.0))))
