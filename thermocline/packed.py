"""Packed rows, and their form as bytes that can be stored, sent, and read on any machine.

    "TCPK" | u32 length of the head | head, JSON: the layout | a blob of the cold store

The blob has the format of ``kvstore.blobs.format``: it names its codec, its checksum covers header
and payload, and it has a digest of the layout, which covers the head. Reading executes nothing.
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
    layout: KVLayout  # of one side of one layer (``pack``), or of all layers (``pack_run``)
    first_token: int
    num_tokens: int
    payload: memoryview
    # Views of the payload's parts by name; which there are depends on the method.
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """The size of the payload in bytes; the other fields are not counted."""
        return len(self.payload)

    def tobytes(self) -> bytes:
        """Return the rows and a checksum as bytes, which ``Method.frombytes`` reads."""
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
        """Return the rows of a ``tobytes`` call; the payload is a view of ``data``.

        Raises:
            Corrupt: ``data`` was truncated, extended or changed.
            Mismatch: ``data`` has another version of the format, or is a blob of a server's store.
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
        raise Mismatch("this is a blob of a server's store, which only the server can read")
    if blobs.layout_digest(layout) != header.layout:
        raise Corrupt("the layout is not the one that was packed")


def row_arrays(codec: RowCodec, packed: Packed) -> dict[str, np.ndarray]:
    """Return views of the first tokens, scales and codes in a payload of ``pack``.

    Empty for rows of ``pack_run``. Raises ``Corrupt`` if the payload does not fit its layout.
    """
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
