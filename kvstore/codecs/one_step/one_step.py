"""Calibrated presets that are entropy-coded: KLT over heads, K|V or layers, and one step for all.

The stages: un-RoPE, the model's mean, a gain of 1.5 dB steps for K and V of each layer, the metric
of each head, KLT, one step for every component of the model, rANS with static tables. Rows are
restored with integers (see ``stages.integer_rows``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.entropy.class_coder import ClassCoder
from kvstore.codecs.entropy.tables import (
    NUM_CLASSES,
    SymbolTables,
    classes_of,
    fit_tables,
    plane_bits,
)
from kvstore.codecs.learning.samples import Samples
from kvstore.codecs.one_step.fused_steps import fused_steps
from kvstore.codecs.one_step.prediction_design import NOISE, PredictionWindow
from kvstore.codecs.one_step.spectrum import ROUNDING, Spectrum, codes_of
from kvstore.codecs.one_step.step_integers import ARRAYS, StepIntegers
from kvstore.codecs.profile import Profile
from kvstore.codecs.stacks.pipeline import Pipeline, StackPacker
from kvstore.codecs.stacks.stack_shape import Scope, stack_shapes
from kvstore.codecs.stages.gain import LogGain
from kvstore.codecs.stages.integer_rows import IntegerRows, StepRows
from kvstore.codecs.stages.model_transforms import ModelMean, UnRope
from kvstore.codecs.stages.uniform import NUM_SHIFTS, PredictedStep, Predictors, UniformStep
from kvstore.shapes import KVLayout

MISSES_AT_A_TIME = 1024  # rows at a time
MOST_RATIO = 1024  # of a deviation to the step
SMALLEST_STEP = 1e-12  # for a model whose KV is the same for all tokens


@dataclass(frozen=True)
class OneStep:
    """Spends ``bits`` per element in calibration, without gains.

    ``window``: the units from which others are predicted; None = no prediction.
    """

    scope: Scope
    bits: float
    window: PredictionWindow | None = None

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        shapes = stack_shapes(self.scope, samples.layout)
        spectra = [Spectrum(samples, shape, means) for shape in shapes]
        if self.window is not None:
            step = _expected_step([x.deviations for x in spectra], self.bits)
            for spectrum in spectra:
                spectrum.predict(self.window, step)
        step = _find_step(spectra, self.bits)
        learned = {"step": np.array([step], np.float32)}
        for number, spectrum in enumerate(spectra):
            spectrum.truncate(step)
            learned |= {f"{name}.{number}": x for name, x in spectrum.learned().items()}
        learned |= _learned_tables("", (x.codes(step) for x in spectra))
        shifts = _shifts(itertools.chain.from_iterable(_misses(x, step) for x in spectra))
        for number, spectrum in enumerate(spectra):
            learned |= _learned_integers(number, *spectrum.integers(step, shifts))
        learned |= _learned_tables("gain_", (x.gain_codes() for x in spectra))
        return learned

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[StackPacker, ...]:
        step = float(learned["step"][0])
        tables = _tables(learned, "")
        gain_tables = _tables(learned, "gain_")
        parts = []
        for number, shape in enumerate(stack_shapes(self.scope, layout)):
            own = StepIntegers(shape, step, **{x: learned[f"{x}.{number}"] for x in ARRAYS})
            coder, rows, predictors = (
                ClassCoder(own.classes, tables),
                own.step_rows,
                own.predictors,
            )
            steps = UniformStep(step, own.levels, ROUNDING)
            stage = PredictedStep(steps, predictors, own.coded) if predictors.components else steps
            pipeline = Pipeline(
                shape,
                (UnRope(shape, profile.ropes), ModelMean(shape, learned["means"])),
                LogGain(shape, own.gain_centres, ClassCoder(own.gain_classes, gain_tables)),
                (IntegerRows(rows),),
                stage,
                coder,
            )
            known = (rows, own.levels, predictors, learned["means"])
            parts.append(fused_steps(pipeline, stage, profile, known))
        return tuple(parts)


def _learned_integers(
    number: int, rows: StepRows, levels: np.ndarray, predictors: Predictors
) -> dict[str, np.ndarray]:
    learned = {"levels": levels, **vars(rows), **vars(predictors)}
    return {f"{name}.{number}": x for name, x in learned.items()}


def _learned_tables(
    prefix: str, codes: Iterable[tuple[np.ndarray, np.ndarray]]
) -> dict[str, np.ndarray]:
    tables = fit_tables(codes)
    return {f"{prefix}frequencies": tables.frequencies, f"{prefix}largest": tables.largest}


def _tables(learned: Mapping[str, np.ndarray], prefix: str) -> SymbolTables:
    """Returns copies of tables: kernels refuse read-only arrays, such as those of a file."""
    frequencies = np.array(learned[f"{prefix}frequencies"], np.uint16)
    return SymbolTables(frequencies, np.array(learned[f"{prefix}largest"]))


def _expected_step(deviations: list[np.ndarray], bits: float) -> float:
    """Estimates the step that takes so many bits, by reverse water-filling.

    A step leaves an error of ``NOISE`` times its square.
    """
    variances = np.square(np.concatenate([x.reshape(-1) for x in deviations]))
    low, high = 0.0, max(float(variances.max()), SMALLEST_STEP**2)
    for _ in range(40):
        level = (low + high) / 2
        spent = float(np.log2(np.maximum(variances / level, 1)).mean() / 2)
        low, high = (level, high) if spent > bits else (low, level)
    return float(np.sqrt(high / NOISE))


def _find_step(spectra: list[Spectrum], bits: float) -> float:
    """Finds the step that takes so many bits, by bisection in octaves; finer steps take more.

    Rows of low rank get fewer bits: with a finer step their levels would not fit 16 bits.
    """
    size = sum(spectrum.left.size for spectrum in spectra)
    largest = max(spectrum.deviations.max() for spectrum in spectra)
    high = float(np.log2(max(largest, SMALLEST_STEP)))
    low = high - 20
    for _ in range(16):
        step = 2 ** ((low + high) / 2)
        spent = sum(_entropy(*spectrum.codes(step)) for spectrum in spectra) / size
        low, high = ((low + high) / 2, high) if spent > bits else (low, (low + high) / 2)
    return max(2 ** ((low + high) / 2), float(largest) / MOST_RATIO)


def _misses(spectrum: Spectrum, step: float) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields sizes of codes, how far values lie above these, and classes, a few rows at a time."""
    components, deviations = spectrum.beyond(step)
    for first in range(0, len(components), MISSES_AT_A_TIME):
        rows = slice(first, first + MISSES_AT_A_TIME)
        sizes = np.abs(codes_of(components[rows], step))
        above = np.abs(components[rows]) / step - sizes
        yield np.minimum(sizes, NUM_SHIFTS - 1), above, classes_of(deviations[rows] / step)


def _entropy(codes: np.ndarray, classes: np.ndarray) -> float:
    """Returns the bits of one token's codes under one table for each class."""
    total = 0.0
    for number in np.unique(classes):
        low = int(plane_bits(number))
        high = codes[classes == number] >> low
        counts = np.bincount((high - high.min()).reshape(-1))
        shares = counts[counts > 0] / high.size
        total += len(high) * (low - float((shares * np.log2(shares)).sum()))
    return total


def _shifts(misses: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Returns how far centroids lie from the middles of cells, fp32 (NUM_CLASSES, NUM_SHIFTS)."""
    totals, counts = np.zeros((2, NUM_CLASSES * NUM_SHIFTS))
    for sizes, beyond, classes in misses:
        keys = (classes[:, None] * NUM_SHIFTS + sizes).reshape(-1)
        totals += np.bincount(keys, beyond.reshape(-1), len(totals))
        counts += np.bincount(keys, minlength=len(counts))
    shifts = (totals / (counts + 50)).reshape(NUM_CLASSES, NUM_SHIFTS).astype(np.float32)
    shifts[:, 0] = 0
    return shifts


BALANCED = OneStep(Scope("layer"), 1.35, PredictionWindow(384, 2))
MAX = OneStep(Scope("group", 10), 0.70, PredictionWindow(768, 2))
SAFE = OneStep(Scope("layer"), 5.2, PredictionWindow(384, 2))
