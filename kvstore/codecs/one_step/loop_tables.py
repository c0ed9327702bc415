"""The integers of a closed loop, in the order in which kernels read them."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np

from kvstore.codecs.entropy.tables import SymbolTables, plane_bits
from kvstore.codecs.one_step.closed_loop import LoopIntegers
from kvstore.codecs.stacks.fused import aligned, padded
from kvstore.codecs.stacks.stack_shape import StackShape


class LoopTables(NamedTuple):
    """What packing and restoring read of all units.

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
    """What restoring reads besides.

    Attributes:
        left: int32 (units, columns), shifts to a common unit.
        means: fp32 (units, width).
        part_of: int64 (head vectors of a unit,), the gain group of each.
    """

    left: np.ndarray
    means: np.ndarray
    part_of: np.ndarray


class PackingTables(NamedTuple):
    """What packing reads besides.

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


def loop_tables(
    shape: StackShape,
    kernels: ModuleType,
    integers: LoopIntegers,
    symbols: SymbolTables,
    means: np.ndarray,
) -> tuple[LoopTables, RestoringTables, PackingTables]:
    """Makes the tables of a stack. ``means``: fp32, of all elements of a token."""
    i, columns = integers, kernels.COLUMNS
    width = -(-shape.width // columns) * columns
    constants, encode = _coding(i, symbols, kernels)
    sums = [x.sum(axis=1, dtype=np.int32) for x in (i.known, i.own)]
    starts = [part.start for part in shape.gain_groups]
    own_means = aligned(means[shape.elements].astype(np.float32))
    channels = np.ldexp(np.float32(1), -i.exponents.astype(np.int32))
    tables = LoopTables(
        counts=i.counts.astype(np.int64),
        known=_panels(i.known, kernels.GROUP, columns),
        wide=_panels(i.wide, 2, columns),
        own=_panels(i.own, kernels.GROUP, columns),
        begins=aligned(-kernels.OFFSET * padded(np.stack(sums, axis=1), 2, width)),
        shifts=aligned(padded(np.stack([i.up, i.down], axis=1).astype(np.int32), 2, width)),
        finer=i.finer.astype(np.int32),
        rows=_read_only(i.own),
        constants=aligned(constants),
    )
    parts = np.searchsorted(starts, shape.starts, side="right").astype(np.int64) - 1
    rest = aligned(padded(i.rest.astype(np.int32), width))
    return (
        tables,
        RestoringTables(aligned(padded(i.left, width)), own_means, parts),
        PackingTables(own_means, aligned(padded(channels, width)), rest, encode),
    )


def _read_only(rows: np.ndarray) -> np.ndarray:
    """Returns the same rows, which kernels expect so: those of a profile's file are read only."""
    found = np.ascontiguousarray(rows).view()
    found.flags.writeable = False
    return found


def _coding(
    integers: LoopIntegers, symbols: SymbolTables, kernels: ModuleType
) -> tuple[np.ndarray, np.ndarray]:
    """Returns constants and panels of the components, at the places that kernels give them."""
    counts, lanes = integers.counts, kernels.LANES
    apart = -(-counts[:, 0] // lanes) * lanes
    room = -(-int((apart + counts[:, 1]).max() + lanes) // kernels.COLUMNS) * kernels.COLUMNS
    units, width = len(counts), integers.encode.shape[2]
    constants = np.zeros((units, kernels.CONSTANTS, room), np.int32)
    rows = np.zeros((units, room, width), np.int16)
    for unit, (wide, others) in enumerate(counts.tolist()):
        places = np.concatenate([np.arange(wide), apart[unit] + np.arange(others)])
        live = slice(0, wide + others)
        classes = integers.classes[unit, live]
        rates = np.ascontiguousarray(integers.rates[unit, live]).view(np.int32)
        known = (symbols.largest[classes], plane_bits(classes.astype(np.int64)))
        constants[unit, :, places] = np.stack([rates, *integers.levels[classes].T, *known], axis=1)
        rows[unit, places] = integers.encode[unit, live]
    return constants, _panels(rows.swapaxes(1, 2), 2, kernels.COLUMNS)


def _panels(rows: np.ndarray, size: int, columns: int) -> np.ndarray:
    """Joins ``size`` consecutive rows into one, 32 bits a column, with columns padded to panels.

    ``rows``: (units, rows, columns). Returns uint32 (units, panels, groups, columns).
    """
    kind = {2: np.int16, 4: np.int8}[size]
    units, num_rows, width = rows.shape
    groups, panels = -(-num_rows // size), -(-width // columns)
    panelled = aligned(np.zeros((units, panels, groups, columns), np.uint32))
    view = panelled.view(kind).reshape(units, panels, groups, columns, size)
    for unit in range(units):
        filled = padded(rows[unit][None], groups * size, panels * columns)
        parts = filled.reshape(groups, size, panels, columns)
        view[unit] = parts.transpose(2, 0, 3, 1)
    return panelled
