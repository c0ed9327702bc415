"""Made-up models whose profiles take no learning: bases and deviations of a formula."""

from __future__ import annotations

import numpy as np

from kvstore.codecs.calibrated import calibrated_codec
from kvstore.codecs.fixed_rate.fused_rate import FusedRate
from kvstore.codecs.fixed_rate.rate_integers import integers_of
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.gain import CODES
from kvstore.shapes import DType, KVLayer, KVLayout, Rope

RUNS = (6, 5, 4, 4, 3, 3, 3, 3, 3, 3, 2, 2, 2, 1, 1, 0)  # bits of the components, repeated
# By head dimension: digests, 8 bytes of blake2b, of 70 tokens' payload and of the restored rows.
GOLDEN = {
    64: ("d3ef30e2ff2ac29d", "98cc05ff77792042"),
    128: ("c0c4ae20ced511d6", "232b3c964de2a250"),
}


def layout_with(*dims: tuple[int, int], dtype: DType = "bfloat16", heads: int = 2) -> KVLayout:
    """Layers of these head and value dimensions."""
    return KVLayout(dtype, tuple(KVLayer(heads, *pair) for pair in dims))


def rope_of(num_channels: int) -> Rope:
    return Rope(tuple(2.0 ** (-k / 4) for k in range(num_channels // 2)))


def profile_of(layout: KVLayout, rope: Rope | None) -> Profile:
    learned: dict[str, np.ndarray] = {}
    elements = np.arange(layout.elements_per_token)
    learned["means"] = ((elements % 13 - 6) / 16).astype(np.float32)
    for number, shape in enumerate(stack_shapes(Scope("head"), layout)):
        integers = integers_of(*_axes(shape.num_units, shape.width))
        learned |= {f"{name}.{number}": array for name, array in integers.items()}
        steps = np.linspace(-88, 72, CODES).astype(np.int16)
        learned[f"gain_steps.{number}"] = np.tile(steps, (shape.num_units, 1))
    return Profile("made up", layout, (rope,) * len(layout.layers), {"dense3": learned})


def _axes(num_units: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Orthonormal reflections, another for each unit; no rounding of a libm or BLAS decides."""
    bits = np.sort(np.resize(RUNS, width))[::-1]
    deviations = np.exp2(bits - 4.0)
    deviations /= np.sqrt(np.mean(deviations**2))
    rows = []
    for unit in range(num_units):
        mirror = (np.arange(width) * (unit + 3)) % 7 - 3.0
        reflection = np.eye(width) - 2 * np.outer(mirror, mirror) / (mirror @ mirror)
        rows.append(reflection)
    basis = np.stack(rows)
    return basis, basis, np.tile(deviations, (num_units, 1)), np.tile(bits, (num_units, 1))


def codec_of(layout: KVLayout, rope: Rope | None) -> StackCodec:
    return calibrated_codec("dense3", profile_of(layout, rope))


def pipelines_of(codec: StackCodec) -> StackCodec:
    """The same without kernels."""
    parts = [x.pipeline if isinstance(x, FusedRate) else x for x in _parts(codec)]
    return StackCodec(codec.id, lambda _: parts)


def is_fused(codec: StackCodec) -> bool:
    return all(isinstance(part, FusedRate) for part in _parts(codec))


def _parts(codec: StackCodec) -> list[object]:
    return list(codec.assemble.pipelines)  # type: ignore[attr-defined]
