"""SpectralQuant: a KLT of each head, many bits for the signal, few for the noise.

Idea: on the principal axes found in calibration, components are uncorrelated and have very uneven
variances. The effective number of dimensions is computed from the variances. That many components
are the signal, and all others are noise. Each of the two groups has one table of levels.
Formula: effective = (sum v)^2 / sum v^2 over the variances v of the components.
Size: noise + (signal - noise) * effective / D + 16 / D bits.
Project: SpectralQuant (Dynamis-Labs).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.learning.samples import Samples, principal_axes, unit_rows
from kvstore.codecs.literature.stages.levels import LloydMax
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import Pipeline, WithoutNote
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.gain import HalfGain, root_mean_squares
from kvstore.codecs.stages.model_transforms import ModelMean, UnRope
from kvstore.codecs.stages.planes import BitPlanes
from kvstore.shapes import KVLayout

HEAD = Scope("head")


@dataclass(frozen=True)
class SpectralQuant:
    """Gives ``signal`` bits to signal components and ``noise`` bits to the others."""

    signal: int = 5
    noise: int = 2

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        learned: dict[str, np.ndarray] = {}
        for number, shape in enumerate(stack_shapes(HEAD, samples.layout)):
            sizes = functools.partial(root_mean_squares, shape=shape)
            rows = (stack for stack, _ in unit_rows(samples, shape, means, sizes))
            deviations, basis = principal_axes(rows)
            is_signal = np.arange(shape.width) < effective_dimensions(deviations**2)[:, None]
            learned[f"basis.{number}"] = basis.astype(np.float16)
            learned[f"deviations.{number}"] = _grouped_deviations(deviations, is_signal)
            learned[f"bits.{number}"] = np.where(is_signal, self.signal, self.noise).astype("|u1")
        return learned

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[Pipeline, ...]:
        pipelines = []
        for number, shape in enumerate(stack_shapes(HEAD, layout)):
            bits = learned[f"bits.{number}"].astype(np.int64)
            pipelines.append(
                Pipeline(
                    shape,
                    (UnRope(shape, profile.ropes), ModelMean(shape, learned["means"])),
                    HalfGain(shape),
                    (Klt(learned[f"basis.{number}"]),),
                    LloydMax(1 << bits, learned[f"deviations.{number}"]),
                    BitPlanes(bits),
                )
            )
        return tuple(pipelines)


SPECTRAL = SpectralQuant()


class Klt(WithoutNote):
    """Projects rows onto a basis with orthonormal columns. Implements ``Transform``.

    Axes of components that never get a bit may be absent: there may be fewer columns than rows.
    """

    def __init__(self, basis: np.ndarray) -> None:
        """``basis``: floats (units, width, components)."""
        self._basis = np.ascontiguousarray(basis, np.float32)

    def forward(self, stack: np.ndarray, first_token: int) -> tuple[np.ndarray, bytes]:
        # Components are contiguous in memory, which is the order of the coders.
        components = np.matmul(self._basis.swapaxes(1, 2), stack.swapaxes(1, 2))
        return components.swapaxes(1, 2), b""

    def backward(self, stack: np.ndarray, first_token: int, note: object) -> np.ndarray:
        return np.matmul(stack, self._basis.swapaxes(1, 2))


def effective_dimensions(variances: np.ndarray) -> np.ndarray:
    """Return the number of equal components with the same spread, over the last axis, rounded up.

    ``variances``: floats (..., components). Returns whole numbers in fp64 (...,).
    """
    spread: np.ndarray = variances.sum(axis=-1) ** 2 / np.sum(variances**2, axis=-1)
    return np.ceil(spread)


def _grouped_deviations(deviations: np.ndarray, is_signal: np.ndarray) -> np.ndarray:
    """The root mean square of each group, for all of its components."""
    grouped = np.zeros(deviations.shape)
    for group in (is_signal, ~is_signal):
        counts = np.maximum(group.sum(axis=1, keepdims=True), 1)
        grouped += group * np.sqrt((group * deviations**2).sum(axis=1, keepdims=True) / counts)
    return grouped.astype(np.float32)
