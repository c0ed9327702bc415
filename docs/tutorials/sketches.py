"""Sketches: signs of the residual make products unbiased, and increase their variance.

    python -m docs.tutorials.sketches [--plot sketches.png]

Attention needs products of a query with keys. A restored key has the right length, but its
direction differs a little, so products with it are too small on average: by 6 % with two bits and
by 2 % with three. TurboQuant-prod (arXiv 2504.19874) uses one of the bits for signs of random
projections of the residual, as QJL does (arXiv 2406.03482): the expected product is then the exact
one. But a bit of levels reduces the error of a single product more than a bit of signs does, and
softmax takes single products. At equal bits ``tq`` has the smaller error, and ``tqprod`` has none
on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import thermocline
from docs.tutorials.picture import draw, path_of_picture

METHODS = ("tq:bits=2", "tqprod:bits=2", "tq:bits=3", "tqprod:bits=3", "tq:bits=4", "tqprod:bits=4")


@dataclass(frozen=True)
class Products:
    """Products of queries with packed keys. ``slope``: that of the line from exact to found."""

    method: str
    bits: float
    slope: float
    error: float  # root mean square error, over the root mean square of the exact products
    found: np.ndarray


def rows(
    num_keys: int = 4096, num_queries: int = 16, dim: int = 128
) -> tuple[np.ndarray, np.ndarray]:
    """Make keys (1, tokens, dim) and queries (1, queries, dim); half of the queries are keys."""
    random = np.random.default_rng(0)
    keys = random.standard_normal((1, num_keys, dim), dtype=np.float32)
    others = random.standard_normal((1, num_queries // 2, dim), dtype=np.float32)
    return keys, np.concatenate([keys[:, 100 : 100 + num_queries // 2], others], axis=1)


def measured(keys: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, list[Products]]:
    """Return the exact products, and those of each method."""
    exact = queries @ keys.swapaxes(1, 2)
    results = []
    for name in METHODS:
        method = thermocline.codec(name)
        found = method.scores(queries, method.pack(keys))
        results.append(
            Products(
                name,
                method.bits(),
                float(np.sum(found * exact) / np.sum(exact**2)),
                float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2))),
                found,
            )
        )
    return exact, results


def main(arguments: Sequence[str] | None = None) -> None:
    picture = path_of_picture(__doc__, arguments)
    exact, results = measured(*rows())
    print("method          bits  slope  error")
    for row in results:
        print(f"{row.method:14}  {row.bits:4.2f}  {row.slope:.3f}  {row.error:.3f}")
    if picture is not None:
        draw(picture, *(lambda axes, x=x: _scatter(axes, exact, x) for x in results[:2]))


def _scatter(axes, exact: np.ndarray, row: Products) -> None:
    axes.plot(exact.ravel()[::7], row.found.ravel()[::7], ".", markersize=2, alpha=0.4)
    ends = np.array([exact.min(), exact.max()])
    axes.plot(ends, ends, "k--", linewidth=0.8, label="exact")
    axes.plot(ends, row.slope * ends, "r", linewidth=0.8, label=f"slope {row.slope:.2f}")
    axes.set(title=row.method, xlabel="exact product", ylabel="product with the packed key")
    axes.legend()


if __name__ == "__main__":
    main()
