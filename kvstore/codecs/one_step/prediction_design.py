"""Learns to predict a unit's components linearly from earlier units, and makes integers of it.

It is a regression on the first components of the earlier units as they will be known: with the
noise of one step. Then the unit's own first components are rotated so that their residuals are
uncorrelated, because bits are spent on the residuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.codecs.stages.uniform import MOST_FINER, Predictors

LARGEST_FACTOR = 32767
RIDGE = 0.003  # times the mean variance of the known components
LEAST_NOISE = 1e-30
NOISE = 0.1  # error of a coded component, as a share of the squared step; rounding leans to zero


@dataclass(frozen=True)
class PredictionWindow:
    """The components from which the first components of a unit are predicted.

    They are the first ``components`` of each of the ``depth`` units before it.
    """

    components: int
    depth: int


@dataclass(frozen=True, eq=False)
class Expectation:
    """The prediction of one unit.

    ``turn``: fp32 (components, components), whose columns rotate the unit's first components.
    ``weights``: fp32 (known, components), for the rotated ones, farthest unit first. All else is of
    the rotated ones, too: ``deviations``, falling, and ``left``, the deviations of the residuals,
    fp64 (components,).
    """

    turn: np.ndarray
    weights: np.ndarray
    deviations: np.ndarray
    left: np.ndarray


def band_of(rows: Iterator[np.ndarray], window: PredictionWindow) -> list[list[np.ndarray]]:
    """Returns mean products of each unit's components with those of the units before it.

    ``rows``: fp32 (units, tokens, components), text by text. Item [u][d] is fp32 (components of u,
    components of u - d), for d up to the window's depth.
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

    ``step``: approximately the one with which units will be coded.
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
    # Units that are the same for all tokens predict nothing; noise keeps their matrix invertible.
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
    """Returns predictors of levels, in whole numbers.

    ``weights``: for each unit, floats (known, components). ``per_step``: (units, components): the
    number of levels in a step.
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
