"""Rows stored without a codec: under an exact codec, for first tokens, and for lost packed bytes.

Under an exact codec rows keep the engine's dtype bit for bit. Rows that came from a lossy copy
which is gone keep 16 bits per value (an fp32 cache is rounded to bf16), the precision that codecs
work in anyway; so do tails written by older releases. The first tokens of a session are kept in
16 bits under every codec, and their exponents, which repeat, are squeezed. Unsqueezed, these tokens
take a seventh of a session of 300 tokens at a bit and a half.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np

from kvstore.codecs.floats import from_stored, to_stored
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, KVRun


class WholeRows:
    """Rows as they are: for each layer K then V, each (num_kv_heads, num_tokens, dim) in C order.

    ``restored``: some of them came from a lossy copy, and must not be packed again.
    """

    def __init__(self, layout: KVLayout, exact: bool, restored: bool = False) -> None:
        self._layout = layout
        self.exact = exact
        self.restored = restored
        self.codec_id = ("restored" if restored else "rows") + (".1" if exact else "16.1")

    def nbytes(self, num_tokens: int) -> int:
        itemsize = self._layout.numpy_dtype.itemsize if self.exact else 2
        return num_tokens * self._layout.elements_per_token * itemsize

    def least_nbytes(self, num_tokens: int) -> int:
        """Return the fewest bytes that this number of tokens may take."""
        return self.nbytes(num_tokens)

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


class ThinRows:
    """Rows in 16 bits whose exponents are Huffman-coded; all 16 bits are restored exactly.

    u32 number of values | for each value a byte of mantissa and sign | the other bytes, deflated
    """

    codec_id: Final = "thin16.1"
    exact: Final = False
    restored: Final = False

    def __init__(self, layout: KVLayout) -> None:
        self._rows = WholeRows(layout, exact=False)

    def least_nbytes(self, num_tokens: int) -> int:
        """Return the fewest bytes: half of the bytes are stored uncompressed."""
        return self._rows.nbytes(num_tokens) // 2

    def encode(self, run: KVRun) -> bytes:
        stored = np.frombuffer(self._rows.encode(run), "<u2")
        turned = stored << np.uint16(1) | stored >> np.uint16(15)  # the sign goes to the mantissa
        packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        high = packer.compress((turned >> np.uint16(8)).astype(np.uint8).tobytes())
        low = (turned & np.uint16(0xFF)).astype(np.uint8).tobytes()
        return b"".join([_COUNT.pack(len(stored)), low, high, packer.flush()])

    def decode(self, payload: memoryview, num_tokens: int, out: KVRun) -> None:
        """Fill ``out`` with the first tokens; see ``WholeRows.decode``."""
        count = self._rows.nbytes(num_tokens) // 2
        begin = _COUNT.size + count
        if len(payload) < begin or _COUNT.unpack_from(payload) != (count,):
            raise Corrupt(f"{len(payload)} bytes are not {num_tokens} thin tokens")
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            high = unpacker.decompress(payload[begin:], count + 1)
        except zlib.error as error:
            raise Corrupt(f"the exponents of thin tokens: {error}") from error
        if len(high) != count or not unpacker.eof or unpacker.unused_data:
            raise Corrupt(f"{len(high)} exponents of {count} values")
        turned = np.frombuffer(high, np.uint8).astype("<u2") << np.uint16(8)
        turned |= np.frombuffer(payload, np.uint8, count, _COUNT.size)
        stored = turned >> np.uint16(1) | turned << np.uint16(15)
        self._rows.decode(stored.data.cast("B"), num_tokens, out)


_COUNT: Final = struct.Struct("<I")
