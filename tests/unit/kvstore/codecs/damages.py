"""Arrays of another form than the learned ones."""

from __future__ import annotations

import numpy as np

SHAPES = {
    "a unit too few": lambda x: x[1:],
    "a unit too many": lambda x: np.concatenate([x, x[:1]]),
    "the last axis is shorter": lambda x: x[..., :-1],
    "the last axis is longer": lambda x: np.concatenate([x, x[..., :1]], axis=-1),
    "one axis less": lambda x: x[0],
    "one axis more": lambda x: x[None],
    "nothing": lambda x: x[:0],
    "other values": lambda x: x.astype(bool),
    "twice as wide": lambda x: x.astype(f"{x.dtype.kind}{2 * x.itemsize}"),
}
