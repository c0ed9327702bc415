"""Prints the report of ``thermocline calibrate`` as a table."""

from __future__ import annotations

from typing import Final

from engines.config import CalibrationReport
from kvstore.codecs.quality import Quality
from launch.cli.printing import print_table

COLUMNS: Final = (
    *("preset", "tokens", "bits", "KL", "perplexity", "delta p", "top 1", "needles"),
    *("chains: KL", "top 1", "restore", "cos K", "cos V", "of Gaussian", "of bound"),
)


def print_report(report: CalibrationReport) -> None:
    print_table(COLUMNS, [_cells(row) for row in report.rows], right=COLUMNS[1:])
    times = {row.context: row.prefill_s for row in report.rows if row.prefill_s is not None}
    for context, seconds in times.items():
        print(f"prefill of {context} tokens: {seconds * context / 1000:.2f} s")
    if report.profile:
        print(f"learned: {report.profile}")


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
        "" if row.above_bound_bits is None else f"{row.above_bound_bits:+.3f} bits",
    ]


def _or_blank(figure: float | None, form: str) -> str:
    return "" if figure is None else format(figure, form)
