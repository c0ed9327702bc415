"""Which implementation packs an array: kernels where numba has them, else numpy.

Both give the same bytes. numba is an optional install; without it everything works, slower.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol, TypeAlias

import numpy as np

from kvstore.codecs import floats
from kvstore.codecs.payload import SlotGroup, plan_payload
from kvstore.codecs.reference import ReferenceKernel
from kvstore.codecs.rotated_rows import RotatedRows
from kvstore.codecs.rows import RowFormat
from kvstore.shapes import DType, KVLayer, KVLayout

logger = logging.getLogger(__name__)


class ArrayKernel(Protocol):
    """Packs all K and V of one dimension; one per row format, dimension and dtype."""

    def pack(self, sources: Sequence[np.ndarray], payload: np.ndarray, group: SlotGroup) -> None:
        """Write packed rows and scales of ``sources`` into the slots of ``group`` in ``payload``.

        Each source is (num_heads, num_tokens, dim), with any strides between heads and tokens;
        its rows are contiguous.
        """

    def unpack(self, payload: np.ndarray, group: SlotGroup, outs: Sequence[np.ndarray]) -> None:
        """The inverse. Rows whose scale is zero come out as something finite of no meaning."""


Backend: TypeAlias = Callable[[RowFormat, int, DType], ArrayKernel]


@functools.cache
def reference_kernel(rows: RowFormat, dim: int, dtype: DType) -> ArrayKernel:
    return ReferenceKernel(rows, dtype)


@functools.cache
def best_kernel(rows: RowFormat, dim: int, dtype: DType) -> ArrayKernel:
    """Compiles on the first call for a format, dimension and dtype; see ``presets.warm``."""
    reference = ReferenceKernel(rows, dtype)
    compiled = _compiled_module()
    if compiled is None or not isinstance(rows, RotatedRows) or not compiled.has_kernel(dim):
        return reference
    kernel: ArrayKernel = compiled.compile_kernel(rows.num_bits, dim, dtype)
    if agree(kernel, reference, rows, dim, dtype):
        return kernel
    logger.warning("%s kernel of %d %s values is wrong on this host: using numpy", rows, dim, dtype)
    return reference


@functools.cache
def _compiled_module() -> ModuleType | None:
    """Importing numba takes most of a second: only who packs shall pay for it."""
    try:
        from kvstore.codecs.kernels import compiled
    except ImportError as error:
        logger.info("codecs run in numpy, slower: %s (install thermocline[fast])", error)
        return None
    return compiled


def agree(
    kernel: ArrayKernel, reference: ArrayKernel, rows: RowFormat, dim: int, dtype: DType
) -> bool:
    """Do both give the same bytes for a few rows? A compiler is not to be trusted with a cache."""
    layout = KVLayout(dtype, (KVLayer(1, dim, dim),))
    (source, second), *outs = (layout.empty(40)[0] for _ in range(3))
    ramp = np.arange(source.size, dtype=np.float32).reshape(source.shape)
    values = np.sin(ramp * ramp)
    source[:] = values if dtype == "float32" else floats.narrow(values, dtype)
    second[:] = source[:, ::-1]
    plan = plan_payload(rows, layout, 40, 1 << 20)
    payloads = [np.zeros(plan.nbytes, np.uint8) for _ in outs]
    for packer, payload, out in zip((kernel, reference), payloads, outs, strict=True):
        packer.pack((source, second), payload, plan.groups[0])
        packer.unpack(payload, plan.groups[0], out)
    return all(a.tobytes() == b.tobytes() for a, b in (payloads, *zip(*outs, strict=True)))
