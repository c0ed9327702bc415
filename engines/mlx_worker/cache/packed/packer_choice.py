"""Chooses what packs a live cache: the fastest on this device that proves itself.

Before the first request each candidate packs and unpacks a
few hundred rows, ordinary and strange ones, and everything has to be what the definition in numpy
makes of them, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from engines.mlx_worker.cache.packed.host_packer import HostRowPacker
from engines.mlx_worker.cache.packed.metal_packer import MetalRowPacker, has_metal_kernel
from engines.mlx_worker.cache.packed.mx_packer import MlxRowPacker
from engines.mlx_worker.cache.packed.row_packer import RowKind, RowPacker
from kvstore.codecs import floats

logger = logging.getLogger(__name__)

_NUM_ROWS = 320


class NoPacker(Exception):
    """Nothing on this device packs such rows as the cold store does."""


def choose_packer(kind: RowKind) -> RowPacker:
    """Choose the packer of one kind of rows. Call it on the owner thread.

    Raises:
        NoPacker: nothing on this device gives the right bytes.
    """
    for name, make in _candidates(kind):
        try:
            packer = make()
            if agrees(packer):
                logger.info("live KV rows of %d values are packed by %s", kind.dim, name)
                return packer
            reason = "it gives other bytes than the definition"
        except Exception as error:  # of a compiler, a driver: any kind
            reason = f"{type(error).__name__}: {error}"
        logger.warning("%s cannot pack live KV rows of %d values: %s", name, kind.dim, reason)
    raise NoPacker(f"nothing on this device packs rows of {kind.dim} values as the cold store does")


def _candidates(kind: RowKind) -> Iterator[tuple[str, Callable[[], RowPacker]]]:
    """Yield the packers that this device may have, fastest first."""
    if mx.default_device().type == mx.DeviceType.cpu:
        yield "the host's kernels", lambda: HostRowPacker(kind)
    elif mx.metal.is_available() and has_metal_kernel(kind):
        yield "Metal kernels", lambda: MetalRowPacker(kind)
    yield "mlx operations", lambda: MlxRowPacker(kind)
    yield "plain mlx operations", lambda: MlxRowPacker(kind, butterflies="plain")


def agrees(packer: RowPacker) -> bool:
    """True if a packer gives the definition's bytes."""
    kind, form = packer.kind, packer.kind.format
    stored = sample_rows(kind)
    codes, scales = form.pack(floats.widen(stored, kind.stored))
    packed = packer.pack(mx.array(stored).view(kind.dtype))
    got_codes, got_scales = (np.array(x) for x in packed)
    whole = scales != 0
    if not np.array_equal(got_scales, scales) or not np.array_equal(got_codes[whole], codes[whole]):
        return False
    values = floats.narrow(form.unpack(codes, scales, kind.dim), kind.stored)
    unpacked = packer.unpack(mx.array(codes), mx.array(scales))
    got = np.array(unpacked.view(mx.uint16))
    right = floats.to_stored(values, kind.stored)
    return np.array_equal(got[whole], right[whole]) and not np.any(got[~whole] & 0x7FFF)


def sample_rows(kind: RowKind) -> np.ndarray:
    """Rows to try a packer with, as bit patterns, uint16 (num_rows, dim).

    Their channels have very different sizes, and some rows cannot be packed.
    """
    ramp = np.arange(_NUM_ROWS * kind.dim, dtype=np.float64).reshape(_NUM_ROWS, kind.dim)
    values = np.sin(ramp * ramp) * np.exp(3 * np.sin(np.arange(kind.dim) * 1.7))
    values[-1] = 0
    values[-2] *= 1e-30
    values[-3, 1] = np.inf
    values[-4, 2] = np.nan
    values[-5] *= 1e-7
    with np.errstate(all="ignore"):
        if kind.stored == "float16":
            return floats.to_stored(values.astype(np.float16), "float16")
        return floats.round_to_bf16(values.astype(np.float32))
