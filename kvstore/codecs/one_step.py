"""Calibrated presets that are entropy-coded: KLT over heads, K|V or layers, and one step for all.

Un-RoPE, the model's mean, a gain of 1.5 dB steps for K and V of each layer, the metric of each
head, KLT, one step for every component of the model, rANS with static tables. What restores is in
integers (see ``integer_rows``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.entropy.tables import (
    NUM_CLASSES,
    SymbolTables,
    classes_of,
    fit_tables,
    plane_bits,
)
from kvstore.codecs.fused_steps import fused_steps
from kvstore.codecs.pieces.class_coder import ClassCoder
from kvstore.codecs.pieces.gain import COARSE, LogGain, root_mean_squares
from kvstore.codecs.pieces.integer_rows import IntegerRows, StepRows
from kvstore.codecs.pieces.mean import ModelMean
from kvstore.codecs.pieces.metric import HeadMetric
from kvstore.codecs.pieces.rope import UnRope
from kvstore.codecs.pieces.uniform import NUM_SHIFTS, UniformStep
from kvstore.codecs.pipeline import Pipeline, StackPart
from kvstore.codecs.profile import Profile
from kvstore.codecs.samples import Samples
from kvstore.codecs.stacks import Scope, StackShape, stack_shapes
from kvstore.codecs.statistics import principal_axes, unit_rows
from kvstore.codecs.step_design import rows_of
from kvstore.shapes import KVLayout

SAMPLED_TOKENS = 2048  # of all texts together: enough for the step and the symbol tables
# Deviation over step below which a component's rare codes cost more than they mend.
LIVE_RATIO = 0.3
# Below a half: a code of one costs several bits more than a zero, and has to be worth them.
ROUNDING = 0.4
COMPONENTS_ROUNDED_TO = 16
INTEGERS = ("encode", "rates", "wide", "rows", "counts", "scales")  # what ``StepRows`` is made of


@dataclass(frozen=True)
class OneStep:
    """``bits`` per element in calibration, gains apart."""

    scope: Scope
    bits: float

    def learn(self, samples: Samples, means: np.ndarray) -> dict[str, np.ndarray]:
        shapes = stack_shapes(self.scope, samples.layout)
        spectra = [_Spectrum(samples, shape, means) for shape in shapes]
        step = _find_step([x.components() for x in spectra], self.bits)
        learned = {"step": np.array([step], np.float32)}
        for number, spectrum in enumerate(spectra):
            spectrum.truncate(step)
            learned |= {f"{name}.{number}": x for name, x in spectrum.learned().items()}
        learned |= _learned_tables("", [x.codes(step) for x in spectra])
        shifts = _shifts([x.misses(step) for x in spectra])
        for number, spectrum in enumerate(spectra):
            learned |= {
                f"{name}.{number}": x for name, x in spectrum.integers(step, shifts).items()
            }
        learned |= _learned_tables("gain_", [x.gain_codes() for x in spectra])
        return learned

    def assemble(
        self, profile: Profile, learned: Mapping[str, np.ndarray], layout: KVLayout
    ) -> tuple[StackPart, ...]:
        step = float(learned["step"][0])
        tables = _tables(learned, "")
        gain_tables = _tables(learned, "gain_")
        parts = []
        for number, shape in enumerate(stack_shapes(self.scope, layout)):
            gains = ClassCoder(learned[f"gain_classes.{number}"], gain_tables)
            deviations = learned[f"deviations.{number}"]
            rows = StepRows(*(learned[f"{name}.{number}"] for name in INTEGERS))
            coder = ClassCoder(classes_of(deviations / step), tables)
            levels = learned[f"levels.{number}"]
            pieces = Pipeline(
                shape,
                (UnRope(shape, profile.ropes), ModelMean(shape, learned["means"])),
                LogGain(shape, learned[f"gain_centres.{number}"], gains),
                (IntegerRows(rows),),
                UniformStep(step, levels, ROUNDING),
                coder,
            )
            known = (rows, levels, learned["means"])
            parts.append(fused_steps(pieces, coder, profile, known))
        return tuple(parts)


class _Spectrum:
    """Bases and components of one stack of the samples, while learning."""

    def __init__(self, samples: Samples, shape: StackShape, means: np.ndarray) -> None:
        self._samples, self._shape, self._means = samples, shape, means
        self._metric = HeadMetric(shape, samples.roots(shape))
        self._sampled: list[np.ndarray] = []
        steps: list[np.ndarray] = []
        self.deviations, self.basis = principal_axes(self._rows(steps))
        self._gain_steps = np.rint(np.concatenate(steps, axis=1)).astype(np.int64)
        self._gain_centres = np.rint(self._gain_steps.mean(axis=1)).astype(np.int64)

    def _rows(self, steps: list[np.ndarray]) -> Iterator[np.ndarray]:
        """All rows, once. Some are kept, for what needs less than a covariance does."""
        most = -(-SAMPLED_TOKENS // len(self._samples.texts))
        for stack, gains in unit_rows(self._samples, self._shape, self._means, self._sizes):
            steps.append(COARSE * np.log2(gains))
            rows, _ = self._metric.forward(stack, 0)
            self._sampled.append(rows[:, :: -(-rows.shape[1] // most)].copy())
            yield rows

    def _sizes(self, stack: np.ndarray) -> np.ndarray:
        sizes = root_mean_squares(stack, self._shape)
        steps = np.rint(COARSE * np.log2(np.maximum(sizes, 1e-9)))
        gains: np.ndarray = np.exp2(steps / COARSE).astype(np.float32)
        return gains

    def components(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the rows that were kept: fp32 (rows, tokens), and their deviations (rows,)."""
        rows = np.concatenate(self._sampled, axis=1)
        components = np.matmul(self.basis.swapaxes(1, 2), rows.swapaxes(1, 2))
        return components.reshape(self.deviations.size, -1), self.deviations.reshape(-1)

    def truncate(self, step: float) -> None:
        """Forget components that this step leaves at zero."""
        live = int((self.deviations > LIVE_RATIO * step).sum(axis=1).max())
        live = min(-(-live // COMPONENTS_ROUNDED_TO) * COMPONENTS_ROUNDED_TO, self._shape.width)
        self.basis = self.basis[:, :, :live]
        self.deviations = self.deviations[:, :live].astype(np.float32)

    def classes(self, step: float) -> np.ndarray:
        return classes_of(self.deviations / step)

    def integers(self, step: float, shifts: np.ndarray) -> dict[str, np.ndarray]:
        """``shifts``: of the centroids of all classes."""
        axes = self.basis.swapaxes(1, 2)
        # The metric's roots are symmetric, so rows go through it as columns would.
        encode, _ = self._metric.forward(axes, 0)
        decode = self._metric.backward(axes, 0, None) * np.float32(step)
        known = (self.deviations / step, shifts[self.classes(step)])
        rows, levels = rows_of(encode, decode, *known)
        return {"levels": levels} | {name: getattr(rows, name) for name in INTEGERS}

    def learned(self) -> dict[str, np.ndarray]:
        return {
            "deviations": self.deviations,
            "gain_centres": self._gain_centres.astype(np.int16),
            "gain_classes": self._gain_classes().astype(np.uint8),
        }

    def codes(self, step: float) -> tuple[np.ndarray, np.ndarray]:
        components, deviations = self.components()
        return _codes(components, step), classes_of(deviations / step)

    def misses(self, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sizes of codes, how far the values behind them lie above, and classes."""
        components, deviations = self.components()
        sizes = np.abs(_codes(components, step))
        beyond = np.abs(components) / step - sizes
        return np.minimum(sizes, NUM_SHIFTS - 1), beyond, classes_of(deviations / step)

    def _gain_classes(self) -> np.ndarray:
        deviations = (self._gain_steps - self._gain_centres[:, None]).std(axis=1)
        classes: np.ndarray = np.maximum(classes_of(deviations), 1)
        return classes

    def gain_codes(self) -> tuple[np.ndarray, np.ndarray]:
        codes = (self._gain_steps - self._gain_centres[:, None]).swapaxes(1, 2)
        classes = self._gain_classes().reshape(-1)
        return codes.reshape(len(classes), -1), classes


def _learned_tables(
    prefix: str, codes: list[tuple[np.ndarray, np.ndarray]]
) -> dict[str, np.ndarray]:
    tables = fit_tables(codes)
    return {f"{prefix}frequencies": tables.frequencies, f"{prefix}largest": tables.largest}


def _tables(learned: Mapping[str, np.ndarray], prefix: str) -> SymbolTables:
    """Copies: kernels take no read-only arrays, which those of a file are."""
    frequencies = np.array(learned[f"{prefix}frequencies"], np.uint16)
    return SymbolTables(frequencies, np.array(learned[f"{prefix}largest"]))


def _find_step(sampled: list[tuple[np.ndarray, np.ndarray]], bits: float) -> float:
    """Bisection in octaves; finer steps cost more bits."""
    size = sum(len(deviations) for _, deviations in sampled)
    high = float(np.log2(max(deviations.max() for _, deviations in sampled)))
    low = high - 20
    for _ in range(16):
        step = 2 ** ((low + high) / 2)
        spent = sum(_entropy(x, deviations, step) for x, deviations in sampled) / size
        low, high = ((low + high) / 2, high) if spent > bits else (low, (low + high) / 2)
    return 2 ** ((low + high) / 2)


def _codes(components: np.ndarray, step: float) -> np.ndarray:
    """int64; what ``UniformStep`` makes of them."""
    sizes = np.floor(np.abs(components) / step + ROUNDING)
    codes: np.ndarray = (np.sign(components) * sizes).astype(np.int64)
    return codes


def _entropy(components: np.ndarray, deviations: np.ndarray, step: float) -> float:
    """Bits of one token's codes under one table for each class."""
    classes, total = classes_of(deviations / step), 0.0
    for number in np.unique(classes):
        low = int(plane_bits(number))
        codes = _codes(components[classes == number], step) >> low
        counts = np.bincount((codes - codes.min()).reshape(-1))
        shares = counts[counts > 0] / codes.size
        total += len(codes) * (low - float((shares * np.log2(shares)).sum()))
    return total


def _shifts(misses: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
    """fp32 (NUM_CLASSES, NUM_SHIFTS): how far centroids lie from the middles of cells."""
    totals, counts = np.zeros((2, NUM_CLASSES * NUM_SHIFTS))
    for sizes, beyond, classes in misses:
        keys = (classes[:, None] * NUM_SHIFTS + sizes).reshape(-1)
        totals += np.bincount(keys, beyond.reshape(-1), len(totals))
        counts += np.bincount(keys, minlength=len(counts))
    shifts = (totals / (counts + 50)).reshape(NUM_CLASSES, NUM_SHIFTS).astype(np.float32)
    shifts[:, 0] = 0
    return shifts
