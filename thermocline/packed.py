"""Rows in packed form, with bytes that can be stored, sent and read anywhere.

    "TCPK" | u32 length of the head | head, JSON: the layout | a blob of the cold store

The blob is ``kvstore.blobs.format``'s: it names its codec, and a checksum covers header and
payload. Its digest of the layout covers the head. Nothing in it is ever executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import msgspec
import numpy as np

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import CHUNK
from kvstore.codecs.rows.payload import plan_payload
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.errors import Corrupt, Mismatch
from kvstore.shapes import KVLayout
from thermocline.padded import claimed_layout

MAGIC: Final = b"TCPK"
MAX_HEAD_BYTES: Final = 1 << 20
_NO_MODEL: Final = blobs.fingerprint_digest("")


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed rows, as ``Method.pack`` returns them. Immutable."""

    codec_id: str
    layout: KVLayout  # one side of one layer, or all layers of a run
    first_token: int
    num_tokens: int
    payload: memoryview
    # Parts of the payload by name, views; which there are depends on the method.
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes of the payload, which is all that restoring needs but the other fields."""
        return len(self.payload)

    def tobytes(self) -> bytes:
        """Returns bytes that ``Method.frombytes`` reads back, with a checksum."""
        head = msgspec.json.encode(self.layout)
        key = CHUNK + blake2b(self.payload, digest_size=32).digest()
        header = blobs.Header(
            key,
            blobs.codec_field(self.codec_id),
            _NO_MODEL,
            blobs.layout_digest(self.layout),
            self.first_token,
            self.num_tokens,
        )
        return b"".join(
            (MAGIC, len(head).to_bytes(4, "little"), head, blobs.pack(header, self.payload))
        )

    @classmethod
    def frombytes(cls, data: bytes | bytearray | memoryview) -> Packed:
        """Reads what ``tobytes`` returned; the payload is a view of ``data``.

        Raises:
            Corrupt: cut short, grown, or a bit was changed.
            Mismatch: written by another release.
        """
        view = memoryview(data).cast("B")
        if len(view) < 8 or bytes(view[:4]) != MAGIC:
            raise Corrupt("these are no packed rows")
        length = int.from_bytes(view[4:8], "little")
        if length > min(MAX_HEAD_BYTES, len(view) - 8):
            raise Corrupt(f"a head of {length} bytes")
        try:
            layout = msgspec.json.decode(view[8 : 8 + length], type=KVLayout)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise Corrupt(f"the head cannot be read: {error}") from error
        header, payload = blobs.parse(view[8 + length :])
        _check(layout, header)
        codec_id = header.codec.decode("ascii", "replace")
        return cls(codec_id, layout, header.first_token, header.num_tokens, payload)


def _check(layout: KVLayout, header: blobs.Header) -> None:
    if header.fingerprint != _NO_MODEL or header.key[:1] != CHUNK:
        raise Mismatch("a blob of a server's store, which only that reads")
    if blobs.layout_digest(layout) != header.layout:
        raise Corrupt("the layout is not the one that was packed")


def row_arrays(codec: RowCodec, packed: Packed) -> dict[str, np.ndarray]:
    """Returns the first tokens, scales and codes of rows of one side; none of a whole run."""
    if sum(bool(x) for y in packed.layout.layers for x in (y.head_dim, y.value_dim)) != 1:
        return {}
    num_tokens, first = packed.num_tokens, packed.first_token
    wide = claimed_layout(codec, packed.layout, num_tokens, first, packed.nbytes)
    plan = plan_payload(codec.rows, wide, num_tokens, first)
    payload = np.frombuffer(packed.payload, np.uint8)
    codec.check_payload(payload, plan)
    (slot,) = (slot for slot in plan.slots if slot.dim)
    shape = (slot.num_heads, slot.num_tokens)
    return {
        "first_tokens": slot.sinks(payload),
        "scales": slot.scales(payload).reshape(shape),
        "codes": slot.packed(payload).reshape(*shape, slot.row_nbytes),
    }
