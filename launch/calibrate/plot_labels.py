"""Places names beside the points of a plot so that they hide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

FONT_SIZE: Final = 7.5
# Offsets (right, up) from a point, in points of type, at which its name begins, or ends if it is to
# the left.
_OFFSETS: Final = [
    (side * right, up)
    for right, ups in ((5, (0, 7, -7, 14, -14)), (14, (10, -10, 20, -20, 30, -30, 40, -40)))
    for up in ups
    for side in (1, -1)
]


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
