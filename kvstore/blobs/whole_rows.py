"""Rows kept as they are: under an exact codec, and where their packed bytes are gone.

Under an exact codec they keep the engine's dtype bit for bit. Rows that came from a lossy copy
which is gone keep 16 bits per value (an fp32 cache is rounded to bf16), the precision that codecs
work in anyway; so do tails that older releases left.
"""

from __future__ import annotations

import numpy as np

from kvstore.codecs.floats import from_stored, to_stored
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, KVRun


class WholeRows:
    """Rows as they are: for each layer K then V, each (num_kv_heads, num_tokens, dim) in C order.

    ``restored``: some of them came from a lossy copy, and are not to be packed again.
    """

    def __init__(self, layout: KVLayout, exact: bool, restored: bool = False) -> None:
        self._layout = layout
        self.exact = exact
        self.restored = restored
        self.codec_id = ("restored" if restored else "rows") + (".1" if exact else "16.1")

    def nbytes(self, num_tokens: int) -> int:
        itemsize = self._layout.numpy_dtype.itemsize if self.exact else 2
        return num_tokens * self._layout.elements_per_token * itemsize

    def encode(self, run: KVRun) -> bytes:
        return b"".join(self._stored(x).tobytes() for pair in run for x in pair)

    def decode(self, payload: memoryview, num_tokens: int, out: KVRun) -> None:
        """Fill ``out`` with the first tokens of a payload of ``num_tokens`` tokens.

        Raises:
            Corrupt: the payload does not have the length of that many tokens.
        """
        if len(payload) != self.nbytes(num_tokens):
            raise Corrupt(f"{len(payload)} bytes are not {num_tokens} tokens as they are")
        dtype = self._layout.numpy_dtype if self.exact else np.dtype(np.uint16)
        at = 0
        for array in (x for pair in out for x in pair):
            heads, taken, dim = array.shape
            count = heads * num_tokens * dim
            rows = np.frombuffer(payload, dtype, count, at).reshape(heads, num_tokens, dim)
            array[...] = self._restored(rows[:, :taken])
            at += count * dtype.itemsize

    def _stored(self, array: np.ndarray) -> np.ndarray:
        return array if self.exact else to_stored(array, self._layout.dtype)

    def _restored(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.exact else from_stored(rows, self._layout.dtype)
