"""Has a running server measure its model, and prints the report of ``thermocline calibrate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from engines.config import CalibrationReport
from engines.wire import CodecReport
from kvstore.codecs.quality import Quality
from launch.errors import LaunchError
from launch.printing import one_line, say
from launch.remote.server import Remote

LOOK_EVERY_S: Final = 2.0
# An engine reports now and then how far it is; one that was restarted reports nothing more.
SILENCE_S: Final = 60.0
COLUMNS: Final = (
    *("preset", "tokens", "bits", "KL", "perplexity", "delta p", "top 1", "needles"),
    *("chains: KL", "top 1", "restore", "cos K", "cos V", "of Gaussian"),
)
NAME: Final = 12  # characters of a preset's name
FIGURE: Final = 7  # and of a figure


def measure_served(
    remote: Remote,
    on_progress: Callable[[str], None],
    on_rows: Callable[[Sequence[Quality]], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> CalibrationReport:
    """Have the server begin, and return its figures when it has ended. Takes minutes.

    The measurement goes on if this is interrupted. The report has no single texts, and beside the
    new figures those that older runs have left of other presets.

    Args:
        on_progress: called with the progress, whenever that changes.
        on_rows: called with all rows so far, again and again.

    Raises:
        LaunchError: the server cannot measure, or has given up.
    """
    before = remote.codec()
    shown, heard = remote.measure(), clock()
    on_progress(shown)
    while True:
        sleep(LOOK_EVERY_S)
        codec = _looked(remote)
        on_rows(codec.found if codec is not None else ())
        if codec is not None and codec.progress:
            heard = clock()
            if codec.progress != shown:
                shown = codec.progress
                on_progress(shown)
        elif codec is not None and _has_ended(codec, before):
            return _report(codec)
        elif clock() - heard > SILENCE_S:
            raise LaunchError(
                "the server measures no more, and does not say why: its engine may have been"
                " restarted; look at its log, and ask again"
            )


def _looked(remote: Remote) -> CodecReport | None:
    """Ask what the server says now; None if it does not answer, which may pass."""
    try:
        return remote.codec()
    except LaunchError:
        return None


def _has_ended(codec: CodecReport, before: CodecReport | None) -> bool:
    return codec.ended is not None and (before is None or codec.ended != before.ended)


def _report(codec: CodecReport) -> CalibrationReport:
    """The report of a measurement that has ended. Raises ``LaunchError``: it found nothing."""
    if codec.ended is not None and codec.ended.error:
        raise LaunchError(f"the server has not measured its model: {codec.ended.error}")
    rows = (*codec.rows, *codec.others)
    if not rows:
        raise LaunchError("this server's engine has no codecs to measure")
    return CalibrationReport(fingerprint=codec.fingerprint, engine="", dtype="", rows=rows)


class RowPrinter:
    """Prints the rows of a measurement, each of them as soon as it is there, and once."""

    def __init__(self) -> None:
        self._printed: set[tuple[str, int]] = set()

    def print_rows(self, rows: Iterable[Quality]) -> None:
        """Print those rows that were not printed yet, but none of an early verdict."""
        for row in rows:
            key = (row.preset, row.context)
            if key not in self._printed and not row.is_early:
                if not self._printed:
                    say(_line(COLUMNS))
                self._printed.add(key)
                say(_line(_cells(row)))

    def print_report(self, report: CalibrationReport) -> None:
        """Print the rows that are left, and the lines below the table."""
        self.print_rows(report.rows)
        times = {row.context: row.prefill_s for row in report.rows if row.prefill_s is not None}
        for context, seconds in times.items():
            say(f"prefill of {context} tokens: {seconds * context / 1000:.2f} s")
        if report.profile:
            say(f"learned: {report.profile}")


def _line(cells: Sequence[str]) -> str:
    """Align cells, which have the widths of their titles, or that of a usual figure."""
    name, *figures = map(one_line, cells)
    widths = [max(len(title), FIGURE) for title in COLUMNS[1:]]
    aligned = [cell.rjust(width) for cell, width in zip(figures, widths, strict=True)]
    return "  ".join([name.ljust(NAME), *aligned]).rstrip()


def _cells(row: Quality) -> list[str]:
    return [
        row.preset,
        str(row.context),
        f"{row.bits_per_element:.3f}",
        f"{row.kl:.5f}",
        f"{row.perplexity_change_pct:+.2f} %",
        _or_blank(row.delta_p, ".2%"),
        f"{row.top1:.1%}",
        f"{row.needle_found}/{row.needle_total}",
        _or_blank(row.chain_kl, ".5f"),
        _or_blank(row.chain_top1, ".1%"),
        _or_blank(row.restore_share, ".1%"),  # of a prefill
        f"{row.cos_k:.4f}",
        f"{row.cos_v:.4f}",
        "" if row.gaussian_gap_db is None else f"{row.gaussian_gap_db:+.2f} dB",
    ]


def _or_blank(figure: float | None, form: str) -> str:
    return "" if figure is None else format(figure, form)
