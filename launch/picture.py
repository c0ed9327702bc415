"""Rate against distortion, drawn: what each preset costs a model, and how far from the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from engines.calibration.order import Report
from kvstore.codecs.quality import Quality
from launch.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: Final = (".png", ".svg", ".pdf")
LEAST_KL: Final = 1e-5  # below it is rounding
INSTALL: Final = "pip install 'thermocline[plot]'"


def check_path(path: Path) -> None:
    """Before minutes are spent on measuring. Raises ``UsageError``."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: give a name that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib; run: {INSTALL}") from error


def draw(report: Report, path: Path) -> None:
    """Raises ``LaunchError`` if the file cannot be written."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.bits_per_element < 16]
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    quality, error = figure.subplots(1, 2)
    contexts = sorted({row.context for row in rows})
    for number, context in enumerate(contexts):
        at_context = sorted(
            (row for row in rows if row.context == context), key=lambda x: x.bits_per_element
        )
        _draw_quality(quality, at_context, number)
    _draw_errors(error, [row for row in rows if row.context == contexts[0]] if contexts else [])
    try:
        figure.savefig(path, dpi=150)
    except OSError as failure:
        raise LaunchError(f"the picture cannot be written: {failure}") from failure


def _draw_quality(axes: Axes, rows: Sequence[Quality], number: int) -> None:
    bits = [row.bits_per_element for row in rows]
    kl = [max(row.kl, LEAST_KL) for row in rows]
    label = f"{rows[0].context} tokens"
    axes.scatter(bits, kl, marker="os^Dv"[number % 5], label=label, zorder=3)
    if number == 0:
        for row, x, y in zip(rows, bits, kl, strict=True):
            axes.annotate(row.preset, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(
        xlabel="bits per element, everything counted",
        ylabel="KL of the next token, nats",
        title="What the model notices",
        yscale="log",
    )
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_errors(axes: Axes, rows: Sequence[Quality]) -> None:
    """Squared error in dB, K and V by themselves, and the least that a Gaussian source allows."""
    for name, marker in (("K", "o"), ("V", "s")):
        errors = [row.error_k if name == "K" else row.error_v for row in rows]
        shown = [(row.bits_per_element, x) for row, x in zip(rows, errors, strict=True) if x > 0]
        if shown:
            bits, sizes = zip(*shown, strict=True)
            axes.scatter(bits, 10 * np.log10(sizes), marker=marker, label=name, zorder=3)
    rates = np.linspace(0, max([row.bits_per_element for row in rows], default=4), 50)
    axes.plot(rates, -20 * np.log10(2) * rates, "k--", lw=1, label="Gaussian bound $2^{-2R}$")
    axes.set(
        xlabel="bits per element, everything counted",
        ylabel="squared error, dB of the rows themselves",
        title="What is lost",
    )
    axes.grid(alpha=0.3)
    axes.legend()
