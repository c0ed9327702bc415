"""Made-up models for codecs of one step: axes, deviations and tables of a formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore.codecs.entropy.tables import classes_of, fit_tables
from kvstore.codecs.one_step.closed_loop import LoopIntegers
from kvstore.codecs.one_step.fused_loop import FusedLoop
from kvstore.codecs.one_step.loop_learning import Centroids, integers_of, stacked
from kvstore.codecs.one_step.one_step import ARRAYS, LEVELS, OF_GAINS, OneStep
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.shapes import KVLayout, Rope

SCOPE = Scope("group", 2)
STEP = 0.25
USUAL = (32.0, 0.3)  # largest deviation over step, and below which there is no component


def model_levels() -> np.ndarray:
    levels = Centroids().levels()
    levels[:, 1:] = levels[:, :1] * np.array([-0.125, 0.0625, 0.125])
    return levels


def profile_of(
    layout: KVLayout,
    rope: Rope | None,
    spectra: Sequence[tuple[float, float]] = (USUAL,),
    reach: int = 0,
    layers: int = SCOPE.num_layers,
) -> Profile:
    """``spectra``: of one unit after the other, over again. ``reach``: the known channels."""
    elements = np.arange(layout.elements_per_token)
    tables, gain_tables = fit_tables([]), fit_tables([])
    learned = {
        "means": ((elements % 13 - 6) / 16).astype(np.float32),
        LEVELS: model_levels(),
        "frequencies": tables.frequencies,
        "largest": tables.largest,
        "gain_frequencies": gain_tables.frequencies,
        "gain_largest": gain_tables.largest,
    }
    first = 0
    for number, shape in enumerate(stack_shapes(Scope("group", layers), layout)):
        chosen = [spectra[(first + k) % len(spectra)] for k in range(shape.num_units)]
        parts = (shape.num_units, len(shape.gain_groups))
        gains = (
            np.full(parts, 1, np.int16),
            np.full(parts, classes_of(np.array(3.0)), np.uint8),
        )
        known = vars(integers_for(shape, chosen, reach)) | dict(zip(OF_GAINS, gains, strict=True))
        learned |= {f"{name}.{number}": known[name] for name in ARRAYS}
        first += shape.num_units
    return Profile("made up", layout, (rope,) * len(layout.layers), {"max": learned})


def integers_for(
    shape: StackShape, spectra: Sequence[tuple[float, float]], reach: int = 0
) -> LoopIntegers:
    """Predictions are of all sizes, most of them small."""
    width, units = shape.width, []
    for unit, (top, low) in enumerate(spectra):
        ratios = top * np.exp2(-8 * np.arange(width) / width)
        classes = classes_of(ratios[ratios >= low])
        axes = _reflection(width, unit)[: len(classes)]
        ones = np.ones(width)
        weights = np.zeros((0, width))
        found = integers_of(
            model_levels(), reach, weights, (axes / STEP, axes * STEP), classes, (16 * ones, ones)
        )
        numbers = np.arange(reach * width).reshape(1, reach, width) + unit
        known = (numbers * 40503 % 255 - 127) >> (numbers % 7)
        known[:, : max(reach - unit * width, 0)] = 0
        up = (np.arange(width)[None] * 5 + unit) % 2
        changed = {"known": known.astype(np.int8), "up": up.astype(np.uint8)}
        units.append(dataclasses.replace(found, **changed))
    return stacked(units)


def _reflection(width: int, unit: int) -> np.ndarray:
    """No rounding of a libm or BLAS decides about its integers."""
    mirror = (np.arange(width) * (unit + 3)) % 7 - 3.0
    return np.eye(width) - 2 * np.outer(mirror, mirror) / (mirror @ mirror)


def parts_of(profile: Profile) -> Sequence[StackPacker]:
    return OneStep(SCOPE, STEP).assemble(profile, profile.learned["max"], profile.layout)


def codec_of(parts: Sequence[StackPacker]) -> StackCodec:
    return StackCodec("steps", lambda _: parts)


def is_fused(parts: Sequence[StackPacker]) -> bool:
    return all(isinstance(part, FusedLoop) for part in parts)


def pipelines_of(parts: Sequence[StackPacker]) -> list[Pipeline]:
    """The same without kernels."""
    return [part.pipeline if isinstance(part, FusedLoop) else part for part in parts]
