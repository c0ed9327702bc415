"""Made-up models for codecs of one step: bases, deviations and tables of a formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.codecs.entropy.tables import classes_of, fit_tables
from kvstore.codecs.one_step.fused_steps import FusedSteps
from kvstore.codecs.one_step.one_step import OneStep
from kvstore.codecs.one_step.prediction_design import PredictionWindow
from kvstore.codecs.one_step.step_integers import rows_of
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_codec import StackCodec
from kvstore.codecs.stacks.stack_shape import Scope, StackShape, stack_shapes
from kvstore.codecs.stages.uniform import MOST_FINER
from kvstore.shapes import KVLayout, Rope

SCOPE = Scope("group", 2)
STEP = 0.25
SHIFTS = (0.0, -0.1, -0.02, 0.08)
ALONE = PredictionWindow(0, 0)
USUAL = (32.0, 0.3)  # largest deviation over step, and below which one is dead


def profile_of(
    layout: KVLayout,
    rope: Rope | None,
    spectra: Sequence[tuple[float, float]] = (USUAL,),
    window: PredictionWindow = ALONE,
    layers: int = SCOPE.num_layers,
) -> Profile:
    """``spectra``: of one unit after the other, over again."""
    elements = np.arange(layout.elements_per_token)
    tables, gain_tables = fit_tables([]), fit_tables([])
    learned = {
        "means": ((elements % 13 - 6) / 16).astype(np.float32),
        "step": np.array([STEP], np.float32),
        "frequencies": tables.frequencies,
        "largest": tables.largest,
        "gain_frequencies": gain_tables.frequencies,
        "gain_largest": gain_tables.largest,
    }
    first = 0
    for number, shape in enumerate(stack_shapes(Scope("group", layers), layout)):
        chosen = [spectra[(first + k) % len(spectra)] for k in range(shape.num_units)]
        known = _stack(shape, chosen) | _predictors(shape, window)
        learned |= {f"{name}.{number}": array for name, array in known.items()}
        first += shape.num_units
    return Profile("made up", layout, (rope,) * len(layout.layers), {"max": learned})


def _stack(shape: StackShape, spectra: list[tuple[float, float]]) -> dict[str, np.ndarray]:
    units, width = shape.num_units, shape.width
    falling = np.exp2(-8 * np.arange(width) / width)
    ratios = np.stack([np.where(top * falling < low, 0, top * falling) for top, low in spectra])
    basis = np.stack([_reflection(width, unit) for unit in range(units)])
    shifts = np.tile(np.array(SHIFTS), (units, width, 1))
    rows, levels = rows_of(basis, basis * STEP, ratios, shifts)
    parts = (units, len(shape.gain_groups))
    return {
        "left": (ratios * STEP).astype(np.float32),
        "gain_centres": np.full(parts, 1, np.int16),
        "gain_classes": np.full(parts, classes_of(np.array(3.0)), np.uint8),
        "levels": levels,
        **vars(rows),
    }


def _predictors(shape: StackShape, window: PredictionWindow) -> dict[str, np.ndarray]:
    """Factors of all sizes, most of them small, and some sums that are far too large."""
    known = (shape.num_units, window.components, window.components * window.depth)
    numbers = np.arange(np.prod(known)).reshape(known)
    factors = (numbers * 40503 % 65535 - 32767) >> (numbers % 17)
    factors[: min(window.depth, 1)] = 0
    finer = np.arange(known[0] * known[1]).reshape(known[:2]) * 5 % (MOST_FINER + 1)
    return {"factors": factors.astype(np.int16), "finer": finer.astype(np.int32)}


def _reflection(width: int, unit: int) -> np.ndarray:
    """No rounding of a libm or BLAS decides about its integers."""
    mirror = (np.arange(width) * (unit + 3)) % 7 - 3.0
    return np.eye(width) - 2 * np.outer(mirror, mirror) / (mirror @ mirror)


def parts_of(profile: Profile) -> Sequence[StackPacker]:
    return OneStep(SCOPE, 1.0).assemble(profile, profile.learned["max"], profile.layout)


def codec_of(parts: Sequence[StackPacker]) -> StackCodec:
    return StackCodec("steps", lambda _: parts)


def is_fused(parts: Sequence[StackPacker]) -> bool:
    return all(isinstance(part, FusedSteps) for part in parts)


def pipelines_of(parts: Sequence[StackPacker]) -> list[Pipeline]:
    """The same without kernels."""
    return [part.pipeline if isinstance(part, FusedSteps) else part for part in parts]
