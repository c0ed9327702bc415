"""Draws figures: rate against distortion, and the frame that the other pictures share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from engines.config import CalibrationReport
from kvstore.codecs.names import FLOOR, OWN, first_part
from kvstore.codecs.quality import Quality
from launch.errors import UsageError
from launch.printing import check_output, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

SUFFIXES: Final = (".png", ".svg", ".pdf")
LEAST_KL: Final = 1e-5  # smaller ones are rounding errors
MOST_DB: Final = 3.0  # larger errors are drawn here
INSTALL: Final = "pip install 'thermocline[plot]'"
BITS: Final = "bits per element, everything counted"
OURS: Final = "ours"
USUAL: Final = "usual elsewhere"
PAPERS: Final = "of the literature"
GROUPS: Final = ((OURS, "o", "tab:blue"), (USUAL, "P", "tab:green"), (PAPERS, "s", "tab:orange"))
CONTEXT_MARKERS: Final = "o^Dv*"
FONT_SIZE: Final = 7.5
# Offsets (right, up) from a point, in points of type, at which its name begins, or ends if it is to
# the left.
_OFFSETS: Final = [
    (side * right, up)
    for right, ups in ((5, (0, 7, -7, 14, -14)), (14, (10, -10, 20, -20, 30, -30, 40, -40)))
    for up in ups
    for side in (1, -1)
]


@contextmanager
def drawing(path: Path, size: tuple[float, float], dpi: int = 130) -> Iterator[Figure]:
    """Yield a figure of ``size`` inches, and write it to ``path`` when the block ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    yield figure
    with whole_file(path) as file:
        figure.savefig(file, dpi=dpi)


def check_path(path: Path) -> None:
    """Check that a plot can be written there, before minutes are spent. Raises ``UsageError``."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: give a name that ends in {', '.join(SUFFIXES)}")
    check_output("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib; run: {INSTALL}") from error


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Check the files of ``--json`` and ``--plot``. Raises ``UsageError``."""
    if json is not None:
        check_output("--json", json)
    if plot is not None:
        check_path(plot)


def draw(report: CalibrationReport, path: Path) -> None:
    """Plot the rows of ``report`` into ``path``. Raises ``LaunchError`` if it cannot be written."""
    rows = [row for row in report.rows if row.error_k + row.error_v > 0]
    contexts = sorted({row.context for row in rows})
    first = [row for row in rows if contexts and row.context == contexts[0]]
    with drawing(path, (13, 6), dpi=150) as figure:
        quality, errors = figure.subplots(1, 2)
        _draw_quality(quality, rows, contexts)
        _draw_errors(errors, first)


def _draw_quality(axes: Axes, rows: Sequence[Quality], contexts: Sequence[int]) -> None:
    """KL against bits. Each context has its own marker; presets are named at the first context."""
    for number, context in enumerate(contexts):
        for group, _, color in GROUPS:
            shown = [x for x in rows if x.context == context and _group(x.preset) == group]
            if not shown:
                continue
            axes.scatter(
                [row.bits_per_element for row in shown],
                [max(row.kl, LEAST_KL) for row in shown],
                marker=CONTEXT_MARKERS[number % len(CONTEXT_MARKERS)],
                facecolors="none" if number else color,
                edgecolors=color,
                label=f"{group}, {context} tokens",
                zorder=3,
            )
    axes.set(
        xlabel=BITS,
        ylabel="KL of the next token, nats",
        title="What the model notices",
        yscale="log",
    )
    finish(axes)
    named = [row for row in rows if contexts and row.context == contexts[0]]
    points = [(row.bits_per_element, max(row.kl, LEAST_KL)) for row in named]
    place_labels(axes, [row.preset for row in named], points)


def _draw_errors(axes: Axes, rows: Sequence[Quality]) -> None:
    """Squared error of K and V together in dB, beside the bound for a white Gaussian."""
    points = [(row.bits_per_element, _db((row.error_k + row.error_v) / 2)) for row in rows]
    _draw_points(axes, rows, points)
    _draw_gaussian(axes, rows)
    axes.set(
        xlabel=BITS,
        ylabel="squared error, dB of the rows themselves",
        title="What is lost of rows",
    )
    finish(axes)
    place_labels(axes, [row.preset for row in rows], points)


def _draw_points(
    axes: Axes, rows: Sequence[Quality], points: Sequence[tuple[float, float]]
) -> None:
    for group, marker, color in GROUPS:
        pairs = zip(rows, points, strict=True)
        shown = [point for row, point in pairs if _group(row.preset) == group]
        if shown:
            right, up = zip(*shown, strict=True)
            axes.scatter(right, up, marker=marker, c=color, label=group, zorder=3)


def _group(preset: str) -> str:
    return OURS if first_part(preset) in OWN else USUAL if preset in FLOOR else PAPERS


def _draw_gaussian(axes: Axes, rows: Sequence[Quality]) -> None:
    rates = np.linspace(0, max([row.bits_per_element for row in rows], default=4), 50)
    axes.plot(rates, -20 * np.log10(2) * rates, "k--", lw=1, label="Gaussian bound $2^{-2R}$")


def _db(error: float) -> float:
    return min(float(10 * np.log10(max(error, 1e-12))), MOST_DB)


def finish(axes: Axes) -> None:
    """Add a grid, and a legend if there is anything to name."""
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def place_labels(axes: Axes, names: Sequence[str], points: Sequence[tuple[float, float]]) -> None:
    """Write each name at the first free offset from its point; right beside it if none is free."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # where points lie is only known once all is laid out
    taken = [_dot(axes, point) for point in points]
    for name, point in zip(names, points, strict=True):
        note = axes.annotate(
            name,
            point,
            _OFFSETS[0],
            textcoords="offset points",
            fontsize=FONT_SIZE,
            va="center",
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "0.6", "shrinkA": 0, "shrinkB": 2},
        )
        boxes = ((offset, _moved(note, offset)) for offset in _OFFSETS)
        free = (offset for offset, box in boxes if _is_free(axes, box, taken))
        taken.append(_moved(note, next(free, _OFFSETS[0])))


def _moved(note: Annotation, offset: tuple[int, int]) -> Bbox:
    """Move ``note`` and return the box of its words, without the line to the point."""
    from matplotlib.text import Text

    note.set(ha="left" if offset[0] > 0 else "right")
    note.xyann = offset
    note.get_window_extent()  # moves it
    return Text.get_window_extent(note)


def _is_free(axes: Axes, box: Bbox, taken: Sequence[Bbox]) -> bool:
    inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
    return inside and not any(box.overlaps(x) for x in taken)


def _dot(axes: Axes, point: tuple[float, float]) -> Bbox:
    from matplotlib.transforms import Bbox

    right, up = axes.transData.transform(point)
    return Bbox.from_extents(right - 3, up - 3, right + 3, up + 3)
