"""Rotation: why eight levels are too few for keys as they are, and enough after a rotation.

    python -m docs.tutorials.rotation [--plot rotation.png]

Some channels of keys are ten times larger than others. The outermost level is at about twice the
root mean square of a row, so most values of these channels are clipped, and products depend most
on these. A rotation mixes the channels: after random signs and a Hadamard matrix every value is a
sum of all channels and nearly normal, so that the levels of ``codebooks`` fit. A rotation changes
no length and no product, so attention can be computed from rotated keys and a rotated query
(TurboQuant, arXiv 2504.19874).

``lm3`` and ``tq3`` have the same eight levels; only ``tq3`` rotates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import thermocline
from docs.tutorials.picture import draw, path_of_picture

OUTLIERS = (5, 77)
METHODS = ("lm3", "tq3", "tq4")


@dataclass(frozen=True)
class Loss:
    """The measured size and errors of one method."""

    method: str
    bits: float
    error: float  # squared, relative
    large_channels: float  # the same error, in the two large channels alone


def uneven_keys(num_tokens: int = 2048, dim: int = 128) -> np.ndarray:
    """Make keys of one head, (1, tokens, dim), two of whose channels are ten times larger."""
    keys = np.random.default_rng(0).standard_normal((1, num_tokens, dim), dtype=np.float32)
    keys[:, :, OUTLIERS] *= 10
    return keys


def hadamard(dim: int) -> np.ndarray:
    """Return Sylvester's orthonormal matrix; ``dim`` is a power of two."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(np.float32(dim))


def rotated(keys: np.ndarray) -> np.ndarray:
    """Return rows after random signs and a Hadamard matrix."""
    signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), keys.shape[-1])
    return np.asarray((keys * signs) @ hadamard(keys.shape[-1]))


def measured(keys: np.ndarray) -> list[Loss]:
    """Return the errors of keys, (1, tokens, dim), that each method packed and restored."""
    found = []
    for name in METHODS:
        method = thermocline.codec(name)
        restored = method.restore(method.pack(keys))
        found.append(
            Loss(
                name,
                method.bits(),
                _relative(restored, keys),
                _relative(restored[:, :, OUTLIERS], keys[:, :, OUTLIERS]),
            )
        )
    return found


def _relative(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.sum((found - right) ** 2) / np.sum(right**2))


def kurtosis(rows: np.ndarray) -> float:
    """Return the fourth moment over the squared second one: 3 for a normal variable."""
    return float(np.mean(rows**4) / np.mean(rows**2) ** 2)


def main(arguments: Sequence[str] | None = None) -> None:
    picture = path_of_picture(__doc__, arguments)
    keys = uneven_keys()
    turned = rotated(keys)
    print(
        "fourth moment, which is 3 of a normal variable:"
        f" {kurtosis(keys):.1f}, after the rotation {kurtosis(turned):.2f}"
    )
    query = np.random.default_rng(2).standard_normal((1, keys.shape[2]), np.float32)
    changed = np.abs(rotated(query) @ turned[0].T - query @ keys[0].T).max()
    print(f"largest change of a product by rotation: {changed:.1e}")
    print("method   bits  error  error of the large channels")
    for row in measured(keys):
        print(f"{row.method:6}  {row.bits:5.3f}  {row.error:5.3f}  {row.large_channels:5.3f}")
    if picture is not None:
        draw(
            picture,
            lambda axes: _histogram(axes, keys, "as they are"),
            lambda axes: _histogram(axes, turned, "rotated"),
        )


def _histogram(axes, rows: np.ndarray, title: str) -> None:
    size = np.sqrt(np.mean(rows**2, axis=2, keepdims=True))
    axes.hist(
        (rows / size).ravel(), bins=160, range=(-4, 4), density=True, color="tab:blue", alpha=0.6
    )
    for level in thermocline.codebook(3):
        axes.axvline(level, color="tab:red", linewidth=0.8)
    axes.set(
        title=f"Values of keys, {title}, and the eight levels", xlabel="value over the row's size"
    )


if __name__ == "__main__":
    main()
