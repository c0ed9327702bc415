"""Measuring a model: what is asked for, by a command or of a server that measures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from engines.calibration.gate.profiles import profile_path, save
from engines.config import CalibrationOrder, CalibrationReport
from engines.wire import CodecReport, MeasurementEnd
from kvstore.codecs.names import LITERATURE, OWN
from kvstore.codecs.profile import Profile
from kvstore.codecs.quality import Quality
from kvstore.shapes import KVLayer, KVLayout
from launch.calibrate.profile_notes import find_profile, write_note
from launch.calibrate.program import CalibrateOptions, order_of, presets_of
from launch.cli.calibrate import LOOK_EVERY_S, SILENCE_S, RowPrinter, measure_served
from launch.cli.options import layers
from launch.errors import LaunchError, UsageError
from launch.model.find import find_model
from launch.remote.server import Remote
from launch.settings.effective_settings import EffectiveSettings, effective_settings
from tests.qualities import GOOD

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


def test_groups_and_names() -> None:
    assert set(presets_of("ours")) == {*OWN}
    assert set(presets_of(None)) == {*OWN, "fp8", "q8"}
    assert set(presets_of("all")) == {*OWN, *LITERATURE}
    assert presets_of("max, tq3") == ("max", "tq3")


def test_each_preset_is_measured_once() -> None:
    found = presets_of("tq3,manthan,ours,tq3")
    assert found[:2] == ("tq3", "manthan") and len(found) == len(set(found))


def test_a_name_that_no_codec_has() -> None:
    with pytest.raises(UsageError, match="--presets: no codec named 'tq9'"):
        presets_of("ours,tq9")
    with pytest.raises(UsageError, match="--presets: no codec named ''"):
        presets_of("")


def ordered(folder: Path, options: CalibrateOptions) -> CalibrationOrder:
    flags = {"--model": str(folder), "--engine": "mlx"}
    settings = effective_settings(layers({}, flags=flags), {"HOME": str(folder)})
    model = find_model(settings.settings.engine.model, settings.folders.cache)
    return order_of(settings, model, options)


def contexts_for(folder: Path, longest: int | None, wished: str | None) -> tuple[int, ...]:
    stated = f'"max_position_embeddings": {longest}' if longest else ""
    (folder / "config.json").write_text(f"{{{stated}}}")
    (folder / "model.safetensors").touch()
    return ordered(folder, CalibrateOptions((), (), None, wished)).contexts


@pytest.mark.parametrize(
    ("longest", "contexts"),
    [(8192, (2048, 6144)), (None, (2048, 6144)), (4096, (2048,)), (2048, (1536,)), (700, (128,))],
)
def test_usual_contexts_are_those_that_the_model_takes(tmp_path, longest, contexts):
    assert contexts_for(tmp_path, longest, None) == contexts


def test_a_context_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    assert contexts_for(tmp_path, 4096, "3584") == (3584,)
    with pytest.raises(UsageError, match="has 4096 tokens, .* measure at most 3584"):
        contexts_for(tmp_path, 4096, "3585")
    with pytest.raises(UsageError, match="measuring needs 640"):
        contexts_for(tmp_path, 600, None)
    with pytest.raises(UsageError, match="at most 1048576 tokens"):
        contexts_for(tmp_path, None, "99999999999")


def test_a_context_and_a_text_are_measured_once(tmp_path: Path) -> None:
    assert contexts_for(tmp_path, 4096, "256, 128,256") == (256, 128)
    text = tmp_path / "some.txt"
    text.write_text("Once.")
    twice = (text, tmp_path / "." / "some.txt")
    assert ordered(tmp_path, CalibrateOptions(twice, (), None, None)).fit_texts == (str(text),)
    assert ordered(tmp_path, CalibrateOptions((), twice, None, None)).eval_texts == (str(text),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\x7fELF\0\0\0", "is not text"),
        ("in UTF-16".encode("utf-16"), "is not text; give a file in UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_neither_learned_from_nor_judged_by(tmp_path, content, said):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    file = tmp_path / "some.txt"
    file.write_bytes(content)
    for wishes in (
        CalibrateOptions((file,), (), None, None),
        CalibrateOptions((), (file,), None, None),
    ):
        with pytest.raises(UsageError, match=said):
            ordered(tmp_path, wishes)
    file.write_bytes("Grüße, in Latin-1".encode("latin-1"))
    assert ordered(tmp_path, wishes).eval_texts == (str(file),)


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
    assert "measure again: thermocline calibrate" in caplog.text
