"""``raw``: keeps every byte as the engine has it; the only codec to promise identical tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.codecs.base import check_run
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, KVRun


@dataclass(frozen=True)
class RawCodec:
    """Keeps K, then V of each layer, each (num_kv_heads, num_tokens, dim), one after the other."""

    id: str = "raw.1"
    exact: bool = True

    def check(self, layout: KVLayout) -> None:
        """Accepts any layout."""

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return layout.bytes_per_token * num_tokens

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return self.packed_nbytes(layout, num_tokens, first_token)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        check_run(run, layout)
        return b"".join(np.ascontiguousarray(array).data for pair in run for array in pair)

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        nbytes = self.packed_nbytes(layout, check_run(out, layout), first_token)
        view = np.frombuffer(payload, np.uint8)
        if len(view) != nbytes:
            raise Corrupt(f"payload of {len(view)} bytes, {nbytes} expected")
        at = 0
        for pair in out:
            for array in pair:
                end = at + array.nbytes
                array[:] = view[at:end].view(array.dtype).reshape(array.shape)
                at = end
