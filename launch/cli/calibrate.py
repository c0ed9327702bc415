"""The parts of ``thermocline calibrate`` that ask a running server and print the report."""

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
# After this time without progress the engine counts as restarted: it does not resume by itself.
SILENCE_S: Final = 60.0
COLUMNS: Final = (
    *("preset", "tokens", "bits", "KL", "perplexity", "delta p", "top 1", "needles"),
    *("chains: KL", "top 1", "restore", "cos K", "cos V", "of Gaussian"),
)
NAME: Final = 12  # characters of a preset's name
FIGURE: Final = 7  # characters of a figure, at least


def measure_served(
    remote: Remote,
    on_progress: Callable[[str], None],
    on_rows: Callable[[Sequence[Quality]], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> CalibrationReport:
    """Start a measurement on the server, wait for its end and return the report. Takes minutes.

    The server goes on measuring if this is interrupted. The report has no figures for single
    texts, and also has the rows of other presets from earlier measurements.

    Args:
        on_progress: called with a description of the progress whenever it changes.
        on_rows: called with all rows so far after each look at the server.

    Raises:
        LaunchError: the server cannot measure, failed, or reports no progress any more.
    """
    before = remote.codec()
    shown, heard = remote.measure(), clock()
    on_progress(shown)
    while True:
        sleep(LOOK_EVERY_S)
        codec = _codec_report(remote)
        on_rows(codec.found if codec is not None else ())
        if codec is not None and codec.progress:
            heard = clock()
            if codec.progress != shown:
                shown = codec.progress
                on_progress(shown)
        elif codec is not None and _has_ended(codec, before):
            return _final_report(codec)
        elif clock() - heard > SILENCE_S:
            raise LaunchError(
                "the server stopped measuring without a reason: its engine may have been"
                " restarted; look at its log, and ask again"
            )


def _codec_report(remote: Remote) -> CodecReport | None:
    """Return the server's report on its codecs; None if it does not answer now."""
    try:
        return remote.codec()
    except LaunchError:
        return None


def _has_ended(codec: CodecReport, before: CodecReport | None) -> bool:
    return codec.ended is not None and (before is None or codec.ended != before.ended)


def _final_report(codec: CodecReport) -> CalibrationReport:
    """Return the report of an ended measurement. Raises ``LaunchError`` if it failed."""
    if codec.ended is not None and codec.ended.error:
        raise LaunchError(f"the server has not measured its model: {codec.ended.error}")
    rows = (*codec.rows, *codec.others)
    if not rows:
        raise LaunchError("this server's engine has no codecs to measure")
    return CalibrationReport(fingerprint=codec.fingerprint, engine="", dtype="", rows=rows)


class RowPrinter:
    """Prints each row of a measurement once, as soon as it is known."""

    def __init__(self) -> None:
        self._printed: set[tuple[str, int]] = set()

    def print_rows(self, rows: Iterable[Quality]) -> None:
        """Print the rows that were not printed yet, except those of an early verdict."""
        for row in rows:
            key = (row.preset, row.context)
            if key not in self._printed and not row.is_early:
                if not self._printed:
                    say(_line(COLUMNS))
                self._printed.add(key)
                say(_line(_cells(row)))

    def print_report(self, report: CalibrationReport) -> None:
        """Print the remaining rows and the lines below the table."""
        self.print_rows(report.rows)
        times = {row.context: row.prefill_s for row in report.rows if row.prefill_s is not None}
        for context, seconds in times.items():
            say(f"prefill of {context} tokens: {seconds * context / 1000:.2f} s")
        if report.profile:
            say(f"learned: {report.profile}")


def _line(cells: Sequence[str]) -> str:
    """Return one line of the table; a column is as wide as its title, and at least ``FIGURE``."""
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
