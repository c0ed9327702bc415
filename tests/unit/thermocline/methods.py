"""Methods of which nothing is compiled."""

from __future__ import annotations

import thermocline
from kvstore.codecs.rows.row_codec import RowCodec
from thermocline import Method


def in_numpy(name: str, **parameters: float) -> Method:
    """Make a method without kernels: they take seconds to compile, for each number of bits.

    Kernels give the same bytes; tests of their own compare the two.
    """
    made = thermocline.codec(name, **parameters)
    if isinstance(made.codec, RowCodec):
        return thermocline.codec(name, backend="numpy", **parameters)
    return made
