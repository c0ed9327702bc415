"""Prints the report of ``thermocline calibrate`` as a table."""

from __future__ import annotations

from typing import Final

from engines.calibration.messages import CalibrationReport
from kvstore.codecs.quality import Quality
from launch.cli.printing import print_table

COLUMNS: Final = (
    *("preset", "tokens", "bits", "KL", "perplexity", "top 1", "needles", "cos K", "cos V"),
    *("of Gaussian", "of bound"),
)


def print_report(report: CalibrationReport) -> None:
    print_table(COLUMNS, [_cells(row) for row in report.rows], right=COLUMNS[1:])
    if report.profile:
        print(f"learned: {report.profile}")


def _cells(row: Quality) -> list[str]:
    return [
        row.preset,
        str(row.context),
        f"{row.bits_per_element:.3f}",
        f"{row.kl:.5f}",
        f"{row.perplexity_change_pct:+.2f} %",
        f"{row.top1:.1%}",
        f"{row.needle_found}/{row.needle_total}",
        f"{row.cos_k:.4f}",
        f"{row.cos_v:.4f}",
        "" if row.gaussian_gap_db is None else f"{row.gaussian_gap_db:+.2f} dB",
        "" if row.above_bound_bits is None else f"{row.above_bound_bits:+.3f} bits",
    ]
