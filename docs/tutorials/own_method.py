"""A method from scratch: two functions, their error, two improvements, and how to serve it.

    python -m docs.tutorials.own_method [--plot own_method.png]

Step 1, ``quantise`` and ``dequantise``: each row gets sixteen levels between its smallest and its
largest value. A code takes four bits, and the row's offset and step take 16 bits each.

Step 2, ``in_groups``: one large channel makes the levels of the whole row coarse. With an offset
and a step for each 32 values it affects its own group only; they take a bit for each value.

Step 3, ``turned``: a rotation distributes large channels over all values, and takes no bits. The
matrix is a part of the arithmetic, so it is made from a fixed seed.

``thermocline.simple`` makes a method of each pair; two of the product's methods are measured for
comparison. A server can pack with a method if its settings name a module that registers it:

    # own_method_module.py
    import thermocline
    from docs.tutorials.own_method import methods

    def mine():
        "Rotates a row, then takes sixteen levels between its smallest and its largest value."
        return methods()["turned"].codec

    thermocline.register("mine", mine)

    # thermocline.toml
    [store]
    codec = "mine"
    codec_modules = ["own_method_module"]

``thermocline calibrate --presets mine,tq4`` then measures its loss on a model, and the quality gate
lets it serve only if the loss is within the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import thermocline
from docs.tutorials.picture import draw, path_of_picture
from docs.tutorials.rotation import hadamard, uneven_keys

BITS = 4
GROUP = 32
BESIDE = ("kivi:bits=4", "tq4")  # the product's, for comparison


@dataclass(frozen=True)
class Row:
    """The measured size and error of one method."""

    method: str
    bits: float
    error: float  # squared, relative


# ---- step 1: sixteen levels for a row


def quantise(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes 0 to 15, offsets and steps of rows, fp32 (num_rows, dim)."""
    offset = rows.min(-1, keepdims=True).astype(np.float16)
    step = np.ptp(rows, axis=-1, keepdims=True) / (2**BITS - 1) + 1e-6
    codes = ((rows - offset) / step).round().clip(0, 2**BITS - 1)
    return codes, offset, step.astype(np.float16)


def dequantise(codes: np.ndarray, offset: np.ndarray, step: np.ndarray) -> np.ndarray:
    return codes * step.astype(np.float32) + offset


# ---- step 2: sixteen levels for each 32 values


def in_groups(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes, offset, step = quantise(rows.reshape(len(rows), -1, GROUP))
    return codes.reshape(rows.shape), offset[..., 0], step[..., 0]


def out_of_groups(codes: np.ndarray, offset: np.ndarray, step: np.ndarray) -> np.ndarray:
    groups = codes.reshape(len(codes), -1, GROUP)
    return dequantise(groups, offset[..., None], step[..., None]).reshape(codes.shape)


# ---- step 3: a rotation first


def rotation(dim: int) -> np.ndarray:
    """Return an orthonormal matrix: random signs, then Hadamard's."""
    signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), dim)
    return signs[:, None] * hadamard(dim)


def turned(rows: np.ndarray) -> Any:
    return quantise(rows @ rotation(rows.shape[1]))


def turned_back(codes: np.ndarray, offset: np.ndarray, step: np.ndarray) -> np.ndarray:
    return dequantise(codes, offset, step) @ rotation(codes.shape[1]).T


def methods() -> dict[str, thermocline.Method]:
    """Make the method of each step. An id names an arithmetic: change it if that changes."""
    return {
        "levels": thermocline.simple(quantise, dequantise, bits=BITS, id="levels.1"),
        "groups": thermocline.simple(in_groups, out_of_groups, bits=BITS, id="groups.1"),
        "turned": thermocline.simple(turned, turned_back, bits=BITS, id="turned.1"),
    }


def measured(keys: np.ndarray) -> list[Row]:
    """Return the errors of keys, (1, tokens, dim), that each method packed and restored."""
    others = {name: thermocline.codec(name) for name in BESIDE}
    found = []
    for name, method in {**methods(), **others}.items():
        restored = method.restore(method.pack(keys))
        error = float(np.sum((restored - keys) ** 2) / np.sum(keys**2))
        found.append(Row(name, method.bits(), error))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    picture = path_of_picture(__doc__, arguments)
    rows = measured(uneven_keys())
    print("method        bits   error")
    for row in rows:
        print(f"{row.method:12}  {row.bits:5.3f}  {row.error:.5f}")
    if picture is not None:
        draw(picture, lambda axes: _points(axes, rows))


def _points(axes: Any, rows: list[Row]) -> None:
    for row in rows:
        axes.scatter(row.bits, row.error, color="tab:red" if row.method in BESIDE else "tab:blue")
        axes.annotate(row.method, (row.bits, row.error), (4, 4), textcoords="offset points")
    axes.set(yscale="log", xlabel="bits for each value", ylabel="squared error, relative")
    axes.margins(0.3, 0.15)


if __name__ == "__main__":
    main()
