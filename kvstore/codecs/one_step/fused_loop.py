"""Packs a closed loop in one pass, and restores it in one.

Packing goes from rows to symbols, restoring from levels to rows. Bytes and rows are those of the
pipeline. Kernels are used only where numba is installed, heads are
multiples of 16 channels, and engines hold bf16 or fp32. The pipeline handles all other cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import numpy as np

from kvstore.codecs.entropy.class_coder import ClassCoder, Coded, Outputs
from kvstore.codecs.entropy.rans import padded_tokens
from kvstore.codecs.entropy.tables import (
    FIRST_WIDE,
    NUM_CLASSES,
    NUM_SYMBOLS,
    SYMBOLS,
    SymbolTables,
    plane_bits,
)
from kvstore.codecs.one_step.closed_loop import (
    BYTE,
    LoopIntegers,
    LoopTables,
    PackingTables,
    RestoringTables,
    levels_of,
    most_input,
)
from kvstore.codecs.profile import Profile
from kvstore.codecs.reader import Reader, count_bytes
from kvstore.codecs.stacks.fused import (
    FusedPacker,
    aligned,
    kernels_for,
    padded,
    proven_or_pipeline,
    rope_tables,
    side_by_side,
    wave_run,
)
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import StackShape
from kvstore.codecs.stages.gain import LogGain
from kvstore.shapes import DType, KVRun

CODECS = "one-step codecs"  # in the log
KERNELS: Final = "kvstore.codecs.kernels.units.unpack_loop"
PACKING: Final = "kvstore.codecs.kernels.units.pack_loop"
TRIED_TOKENS: Final = 11  # whole tiles of tokens and a part of one; the definition takes long
ESCAPED: Final = -128  # the level of an escaped symbol, which no other symbol has
KNOWN_BY: Final = 16  # known channels come in such groups


@dataclass(frozen=True, eq=False)
class FusedLoop(FusedPacker):
    """Packs and restores a stack of a one-step preset. Implements ``StackPacker``.

    ``components``: int64 (coded, 3): the unit of each coded component, its number among the unit's
    components that are not wide (negative if it is wide), and its class.
    ``groups``: the first column and the number of columns of each gain group, int64 (groups, 2);
    factors from sums of their squares to means, fp32 (groups,); centres, int32 (units, groups).
    """

    coder: ClassCoder
    integers: LoopIntegers
    outputs: Outputs
    tables: LoopTables
    restoring_tables: RestoringTables
    packing_tables: PackingTables
    components: np.ndarray
    groups: tuple[np.ndarray, np.ndarray, np.ndarray]

    def pack(self, run: KVRun, first: int, first_token: int, dtype: DType) -> bytes | None:
        pipeline = self.pipeline
        addresses, num_tokens = self.addresses(run, first, dtype), run[0][0].shape[1] - first
        if addresses is None:
            return None
        shape, num_rows = pipeline.shape, len(self.components)
        wide = np.flatnonzero(self.components[:, 1] < 0)
        spare, length = self.packing.LANES, padded_tokens(num_tokens)
        symbols = np.empty((num_rows + spare, length), np.uint8)
        low = np.empty((len(wide) + spare, length), np.uint8)
        gains = np.empty((shape.num_units, len(shape.gain_groups), num_tokens), np.float32)
        # Pages that are never written take no memory.
        keys, rare = (np.empty(num_rows * num_tokens, kind) for kind in (np.int64, np.int32))
        count = self.packing.pack(
            addresses,
            num_tokens,
            self.tables,
            self.packing_tables,
            np.int32(most_input(shape.width)),
            (*self.groups, gains, gains.view(np.int32)),
            self.turns.of(shape, first_token, num_tokens, dtype),
            (symbols, low),
            (keys, rare),
            self.packing.scratch_of(num_tokens, self.tables, shape.width),
        )
        if count < 0:
            return None
        kept_low = low[:-spare, :num_tokens][plane_bits(self.components[wide, 2]) > 0]
        found = Coded(symbols[:num_rows], kept_low, rare[np.argsort(keys[:count])])
        coded = self.coder.write_coded(found, num_tokens)
        return b"".join([count_bytes(0), pipeline.gain.write(gains.swapaxes(1, 2)), coded])

    def unpack(
        self,
        readers: Sequence[Reader],
        num_tokens: int,
        turns: tuple[object, ...],
        addresses: tuple[np.ndarray, np.ndarray],
    ) -> None:
        scales, sizes_of = self.integers.scales, (self.tables, self.pipeline.shape.width)
        parts = [self._read(reader, num_tokens) for reader in readers]
        sizes, coded, places = parts[0] if len(parts) == 1 else _joined(parts, num_tokens)
        gains = sizes * scales[:, None, None]
        rows, tokens = np.divmod(places, gains.shape[1])
        is_wide = self.components[rows, 1] < 0
        excess = self._put_rare(coded, rows, tokens, ~is_wide)
        self.restoring.unpack(
            (coded.symbols, np.ascontiguousarray(coded.low), coded.rare[is_wide]),
            excess,
            self.tables,
            self.restoring_tables,
            np.ascontiguousarray(gains.swapaxes(1, 2), np.float32),
            turns,
            addresses,
            self.restoring.scratch_of(gains.shape[1], coded.symbols.shape[1], *sizes_of),
        )

    def _read(self, reader: Reader, num_tokens: int) -> tuple[np.ndarray, Coded, np.ndarray]:
        """Return gains, and what ``ClassCoder.read_coded`` returns."""
        gains = self.pipeline.gain.read(reader, num_tokens)
        return gains, *self.coder.read_coded(reader, num_tokens, self.outputs)

    def _put_rare(
        self, coded: Coded, rows: np.ndarray, tokens: np.ndarray, chosen: np.ndarray
    ) -> np.ndarray:
        """Write the levels of escaped symbols to ``rows``; return what bytes cannot hold.

        Returns int32 (entries, 4): unit, token, number of the component, and excess, in order.
        """
        rows, tokens = rows[chosen], tokens[chosen]
        units, numbers, classes = self.components[rows].T
        levels = levels_of(coded.rare[chosen], self.integers.levels[classes].astype(np.int32))
        cut = np.clip(levels, -BYTE, BYTE)
        coded.symbols[rows, tokens] = cut.astype(np.uint8) ^ np.uint8(self.restoring.OFFSET)
        beyond = np.flatnonzero(levels != cut)
        entries = np.stack([units, tokens, numbers, levels - cut], axis=1)[beyond]
        ordered = entries[np.lexsort((entries[:, 1], entries[:, 0]))]
        return np.ascontiguousarray(ordered, np.int32)


def fused_loop(
    pipeline: Pipeline, integers: LoopIntegers, profile: Profile, means: np.ndarray
) -> StackPacker:
    """Return the fused packer of a pipeline; the pipeline itself if this host cannot fuse it.

    ``means``: fp32 (elements of a token,).
    """
    shape, layout = pipeline.shape, profile.layout
    turns = rope_tables(shape, profile.ropes)
    kernels, packing = (kernels_for(shape, layout, x) for x in (KERNELS, PACKING))
    coder, gain = pipeline.coder, pipeline.gain
    assert isinstance(coder, ClassCoder) and isinstance(gain, LogGain)
    fits = not integers.known.shape[1] % KNOWN_BY
    if turns is None or kernels is None or packing is None or not fits:
        return pipeline
    outputs = coder.outputs(_outputs(coder.tables, integers.levels, kernels.OFFSET))
    tables = _tables(shape, kernels, integers, coder.tables, means)
    columns = [(part.start, part.stop - part.start) for part in shape.gain_groups]
    groups = (np.array(columns, np.int64), gain.shares, np.ascontiguousarray(gain.centres))
    known = (coder, integers, outputs, *tables, _components(integers), groups)
    fused = FusedLoop(pipeline, turns, kernels, packing, *known)
    return proven_or_pipeline(fused, layout, wave_run(layout, TRIED_TOKENS), CODECS)


def _joined(
    parts: Sequence[tuple[np.ndarray, Coded, np.ndarray]], num_tokens: int
) -> tuple[np.ndarray, Coded, np.ndarray]:
    """Join what payloads of whole vectors of tokens hold, as if it were one payload's."""
    gains, coded, places = zip(*parts, strict=True)
    found = [np.divmod(x, num_tokens) for x in places]
    each = [rows * len(parts) + number for number, (rows, _) in enumerate(found)]
    joined = np.concatenate([x * num_tokens + y for x, (_, y) in zip(each, found, strict=True)])
    order = np.argsort(joined)
    symbols, low = (side_by_side([getattr(x, name) for x in coded]) for name in ("symbols", "low"))
    rare = np.concatenate([x.rare for x in coded])[order]
    return np.concatenate(gains, axis=1), Coded(symbols, low, rare), joined[order]


def _components(integers: LoopIntegers) -> np.ndarray:
    units, numbers = np.nonzero(integers.classes)
    classes = integers.classes[units, numbers].astype(np.int64)
    return np.stack([units, numbers - integers.counts[units, 0], classes], axis=1)


def _outputs(tables: SymbolTables, levels: np.ndarray, offset: int) -> np.ndarray:
    """Return what the decoder writes: levels of bytes, but symbols of wide classes."""
    codes = SYMBOLS.astype(np.int32) - tables.largest[:, None]
    found = levels_of(codes, levels[:, None].astype(np.int32))
    found[tables.escapes[:, None] <= SYMBOLS] = ESCAPED
    is_wide = np.arange(NUM_CLASSES)[:, None] >= FIRST_WIDE
    outputs: np.ndarray = np.where(is_wide, SYMBOLS, found.astype(np.uint8) ^ np.uint8(offset))
    assert outputs.shape == (NUM_CLASSES, NUM_SYMBOLS)
    return outputs


def _tables(
    shape: StackShape,
    kernels: ModuleType,
    integers: LoopIntegers,
    symbols: SymbolTables,
    means: np.ndarray,
) -> tuple[LoopTables, RestoringTables, PackingTables]:
    """Return the tables of a stack. ``means``: fp32 (elements of a token,)."""
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
    """Return a read-only view of ``rows``: kernels are compiled for arrays of a profile's file."""
    found = np.ascontiguousarray(rows).view()
    found.flags.writeable = False
    return found


def _coding(
    integers: LoopIntegers, symbols: SymbolTables, kernels: ModuleType
) -> tuple[np.ndarray, np.ndarray]:
    """Return constants and panels of the components, at the places that kernels give them."""
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
    """Join ``size`` consecutive rows into one, 32 bits a column, with columns padded to panels.

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
