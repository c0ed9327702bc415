"""Codebooks: where to put 2, 4, 8 or 16 levels, and the error that remains.

    python -m docs.tutorials.codebooks [--plot codebooks.png]

A quantiser replaces each value by the nearest of a few levels. The levels with the least mean
square error for a normal variable are those of Lloyd and Max: each level is the mean of the
values nearest to it. They are dense where values are frequent. Equidistant levels, even with the
best step, have a larger error, and the gap grows with the number of bits. No quantiser with this
number of bits has an error below 4 ** -bits (Shannon's distortion-rate function of a normal
variable).

Rows of KV are not normal. After a random rotation each value of a row of unit size has a Beta
distribution, which tends to the normal one for long rows; ``thermocline.codebook(bits, dim)``
returns the levels for exactly that distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import thermocline
from docs.tutorials.picture import draw, path_of_picture

BITS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Errors:
    """Mean square errors of a normal variable with variance 1."""

    bits: int
    lloyd_max: float
    equidistant: float  # with the best step
    bound: float


def quantised(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the nearest of the ascending ``levels`` for each value."""
    borders = (levels[1:] + levels[:-1]) / 2
    return np.asarray(levels[np.searchsorted(borders, values)])


def error(values: np.ndarray, levels: np.ndarray) -> float:
    """Return the mean square error of values that are quantised to ``levels``."""
    return float(np.mean((values - quantised(values, levels)) ** 2))


def equidistant(bits: int, step: float) -> np.ndarray:
    """Return ``2 ** bits`` levels around zero."""
    return (np.arange(2**bits) - (2**bits - 1) / 2) * step


def measured(num_values: int = 400_000) -> list[Errors]:
    """Return the errors of each number of bits, measured on normal random values."""
    values = np.random.default_rng(0).standard_normal(num_values)
    return [
        Errors(
            bits,
            error(values, thermocline.codebook(bits)),
            min(error(values, equidistant(bits, step)) for step in np.linspace(0.1, 2, 96)),
            4.0**-bits,
        )
        for bits in BITS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    picture = path_of_picture(__doc__, arguments)
    rows = measured()
    print("bits  Lloyd-Max  equidistant  bound")
    for row in rows:
        print(f"{row.bits:4}  {row.lloyd_max:9.4f}  {row.equidistant:11.4f}  {row.bound:.4f}")
    exact = {dim: thermocline.codebook(3, dim) for dim in (8, 64)}
    for dim, levels in exact.items():
        print(f"the outermost of eight levels for rows of {dim}: {levels[-1]:.3f}")
    print(f"the outermost for a normal variable: {thermocline.codebook(3)[-1]:.3f}")
    if picture is not None:
        draw(picture, lambda axes: _levels(axes), lambda axes: _errors(axes, rows))


def _levels(axes) -> None:
    x = np.linspace(-3.5, 3.5, 300)
    axes.plot(x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color="0.6")
    for bits in BITS:
        levels = thermocline.codebook(bits)
        axes.plot(
            levels, np.full(len(levels), -0.04 * bits), "|", markersize=10, label=f"{bits} bits"
        )
    axes.set(title="Lloyd-Max levels under the normal density", xlabel="value", yticks=[])
    axes.legend()


def _errors(axes, rows: Sequence[Errors]) -> None:
    bits = [x.bits for x in rows]
    axes.semilogy(bits, [x.equidistant for x in rows], "s-", label="equidistant, best step")
    axes.semilogy(bits, [x.lloyd_max for x in rows], "o-", label="Lloyd-Max")
    axes.semilogy(bits, [x.bound for x in rows], "k--", label="bound: 4 ** -bits")
    axes.set(
        title="What is left of the error", xlabel="bits", ylabel="mean square error", xticks=bits
    )
    axes.legend()


if __name__ == "__main__":
    main()
