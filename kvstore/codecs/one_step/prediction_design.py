"""The linear prediction of a unit's components from units before it: learned, and made integers.

Regression on the first components of the units before, as they will be known: with the noise of one
step. Then the first components are turned among each other, such that what is left of them is
uncorrelated: it is the rest that bits are spent on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.stages.prediction import MOST_FINER, Predictors

LARGEST_FACTOR = 32767
RIDGE = 0.003  # of the mean variance of what is known
LEAST_NOISE = 1e-30
NOISE = 0.1  # share of a squared step that coding a component leaves; rounding leans to zero


@dataclass(frozen=True)
class PredictionWindow:
    """The components from which as many of a unit are predicted.

    They are the first ``components`` of each of ``depth`` units before it.
    """

    components: int
    depth: int


@dataclass(frozen=True, eq=False)
class Expectation:
    """The prediction of one unit.

    ``turn``: fp32 (components, components), columns by which its first components are turned.
    ``weights``: fp32 (known, components), for the turned ones, farthest unit first. ``deviations``:
    of the turned ones, falling, and ``left``: of what is not expected, fp64 (components,).
    """

    turn: np.ndarray
    weights: np.ndarray
    deviations: np.ndarray
    left: np.ndarray


def band_of(rows: Iterator[np.ndarray], window: PredictionWindow) -> list[list[np.ndarray]]:
    """Returns mean products of components of each unit with those before, as far as is needed.

    ``rows``: fp32 (units, tokens, components), text by text. Item [u][d] is fp32 (components of u,
    components of u - d).
    """
    band: list[list[np.ndarray]] = []
    num_tokens = 0
    for stack in rows:
        if not band:
            size = (stack.shape[2], stack.shape[2])
            depths = (min(unit, window.depth) + 1 for unit in range(len(stack)))
            band = [[np.zeros(size, np.float32) for _ in range(depth)] for depth in depths]
        for unit, products in enumerate(band):
            for distance, product in enumerate(products):
                product += stack[unit].T @ stack[unit - distance]
        num_tokens += stack.shape[1]
    for products in band:
        for product in products:
            product /= num_tokens
    return band


def expectations(
    band: list[list[np.ndarray]], window: PredictionWindow, step: float
) -> list[Expectation]:
    """Learns the prediction of every unit from the products of ``band_of``.

    ``step``: about the one that units will be coded with.
    """
    found: list[Expectation] = []
    for unit in range(len(band)):
        before = range(max(unit - window.depth, 0), unit)
        own = band[unit][0].astype(np.float64)
        if not before:
            found.append(_alone(own))
            continue
        turns = [found[x].turn for x in before]
        among = [
            [turns[i].T @ _pair(band, v, w) @ turns[k] for k, w in enumerate(before)]
            for i, v in enumerate(before)
        ]
        known = np.block(among)
        with_own = np.concatenate(
            [t.T @ _pair(band, v, unit) for t, v in zip(turns, before, strict=True)]
        )
        found.append(_expected(own, known, with_own, step))
    return found


def _pair(band: list[list[np.ndarray]], unit: int, other: int) -> np.ndarray:
    if unit < other:
        return _pair(band, other, unit).T
    return band[unit][unit - other].astype(np.float64)


def _alone(own: np.ndarray) -> Expectation:
    deviations = np.sqrt(np.maximum(np.diag(own), 0))
    eye, nothing = np.eye(len(own), dtype=np.float32), np.zeros((0, len(own)), np.float32)
    return Expectation(eye, nothing, deviations, deviations)


def _expected(own: np.ndarray, known: np.ndarray, with_own: np.ndarray, step: float) -> Expectation:
    variances = np.diag(known)
    noise = np.minimum(variances, NOISE * step**2) + RIDGE * variances.mean()
    # Units that are the same for all tokens predict nothing, and leave nothing to divide by.
    weights = np.linalg.solve(known + np.diag(np.maximum(noise, LEAST_NOISE)), with_own)
    left = own - weights.T @ with_own
    _, turn = np.linalg.eigh((left + left.T) / 2)
    total = np.einsum("ik,ij,jk->k", turn, own, turn, optimize=True)
    turn = turn[:, np.argsort(-total)]
    both = (np.einsum("ik,ij,jk->k", turn, x, turn, optimize=True) for x in (own, left))
    deviations, beyond = (np.sqrt(np.maximum(x, 0)) for x in both)
    turned = (weights @ turn).astype(np.float32)
    return Expectation(turn.astype(np.float32), turned, deviations, beyond)


def predictors_of(
    weights: list[np.ndarray], per_step: np.ndarray, window: PredictionWindow
) -> Predictors:
    """Returns predictors in whole numbers, of levels.

    ``weights``: for each unit, floats (known, components). ``per_step``: (units, components): how
    many levels a step is.
    """
    size, known = window.components, window.depth * window.components
    if not size:
        return Predictors.none(len(per_step))
    factors = np.zeros((len(weights), size, known), np.int16)
    finer = np.zeros((len(weights), size), np.int32)
    for unit, own in enumerate(weights):
        before = per_step[max(unit - window.depth, 0) : unit, :size].reshape(-1)
        exact = own.T / before * per_step[unit, :size, None]
        peaks = np.maximum(np.abs(exact).max(axis=1, initial=0), 2.0**-MOST_FINER)
        finer[unit] = np.clip(np.floor(np.log2(LARGEST_FACTOR / peaks)), 0, MOST_FINER)
        rounded = np.rint(exact * np.exp2(finer[unit])[:, None])
        factors[unit, :, known - len(before) :] = np.clip(rounded, -LARGEST_FACTOR, LARGEST_FACTOR)
    return Predictors(factors, finer)
