"""The integers of a closed loop as kernels read them; ``fused_loop`` makes them.

Nothing is imported here, since kernels are compiled anew when a file changes that they import.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class LoopTables(NamedTuple):
    """Holds the integers of all units that packing and restoring read.

    A *group* of a matrix holds several known channels, two wide components, or several others.

    Attributes:
        counts: int64 (units, 2), the numbers of wide components and of others.
        known, wide, own: matrices, uint32 (units, panels, groups, columns): from known channels,
            from wide components and from others to channels.
        begins: int32 (units, 2, columns), the initial values of known and of own sums.
        shifts: int32 (units, 2, columns), of sums up, and down to bytes.
        finer: int32 (units,), the bits by which sums of wide components are finer.
        rows: int8 (units, others, width), the others' rows of ``own``.
        constants: int32 (units, CONSTANTS, components), wide ones first, then others from a
            multiple of the lanes on; see ``kernels.emit.loop_tiles``.
    """

    counts: np.ndarray
    known: np.ndarray
    wide: np.ndarray
    own: np.ndarray
    begins: np.ndarray
    shifts: np.ndarray
    finer: np.ndarray
    rows: np.ndarray
    constants: np.ndarray


class RestoringTables(NamedTuple):
    """Holds those that only restoring reads.

    Attributes:
        left: int32 (units, columns), shifts to a common unit.
        means: fp32 (units, width).
        part_of: int64 (head vectors of a unit,), the gain group of each.
    """

    left: np.ndarray
    means: np.ndarray
    part_of: np.ndarray


class PackingTables(NamedTuple):
    """Holds those that only packing reads.

    Attributes:
        means: fp32 (units, width).
        channels: fp32 (units, columns), one over channels' units.
        rest: int32 (units, columns), shifts of residuals.
        encode: uint32 (units, panels, pairs of channels, components), from residuals to components.
    """

    means: np.ndarray
    channels: np.ndarray
    rest: np.ndarray
    encode: np.ndarray
