"""Reads a tutorial's command line, and draws its picture if ``--plot`` names one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def path_of_picture(description: str | None, arguments: Sequence[str] | None) -> Path | None:
    """Return the path that ``--plot`` names, or None."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--plot", type=Path, help="draw a picture, .png or .svg")
    path: Path | None = parser.parse_args(arguments).plot
    return path


def draw(path: Path, *panels: Callable[[Axes], None]) -> None:
    """Draw panels side by side into ``path``. Needs matplotlib: ``pip install '.[plot]'``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(panels), 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
    figure.savefig(path, dpi=120)
