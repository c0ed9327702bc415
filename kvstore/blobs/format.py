"""The blob: one header, one checksum, one payload. Sessions are stored as blobs only.

    offset  size
         0     4  magic "TCKV"
         4     2  format version
         6     1  kind: c chunk, w window rows of a chunk, s state, r session record, p page of a
                  session's chain
         7     1  flags, 0: reserved
         8    24  codec id, ASCII, zero padded
        32    32  digest of the model fingerprint
        64    32  digest of the key that the blob was stored under
        96    16  digest of the layout: dtype, and heads and widths of every layer
       112     4  first token
       116     4  number of tokens
       120     8  payload length
       128     4  CRC-32C of bytes 0..128 and of the payload
       132        payload

A blob describes itself. So a blob under the wrong key, of another model, or of a later version is
refused, and so is one with a single bit changed. The key does not determine the codec: the header
names the codec that reads the payload. If the blob came out of a seal (``kvstore.tiers.seal``), the
seal was verified and the checksum is not computed again. All integers are little-endian.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from kvstore.blobs.chain import FORMAT_VERSION, KEY_BYTES, KINDS
from kvstore.errors import Corrupt, Mismatch
from kvstore.shapes import KVLayout
from kvstore.tiers.seal import is_authentic

MAGIC: Final = b"TCKV"
MAX_PAYLOAD_BYTES: Final = 1 << 31
MAX_CODEC_ID_BYTES: Final = 24
_HEADER: Final = struct.Struct("<4sHcB24s32s32s16sIIQ")
_CRC: Final = struct.Struct("<I")
_KIND: Final = slice(6, 7)
_CODEC: Final = slice(8, 8 + MAX_CODEC_ID_BYTES)
HEADER_BYTES: Final = _HEADER.size + _CRC.size


class Header(NamedTuple):
    """The fields of a blob's header that must agree with the request, and the codec."""

    key: bytes  # kind byte and digest
    codec: bytes
    fingerprint: bytes
    layout: bytes
    first_token: int
    num_tokens: int


class VerifiedBlob(NamedTuple):
    """A blob whose checksum and header were verified, so that unpacking need not repeat that."""

    blob: bytes | bytearray | memoryview
    header: Header
    payload: memoryview  # a view of ``blob``


def fingerprint_digest(fingerprint: str) -> bytes:
    return blake2b(fingerprint.encode(), digest_size=32).digest()


def layout_digest(layout: KVLayout) -> bytes:
    layers = ";".join(f"{x.num_kv_heads},{x.head_dim},{x.value_dim}" for x in layout.layers)
    return blake2b(f"{layout.dtype}|{layers}".encode(), digest_size=16).digest()


def codec_field(codec_id: str) -> bytes:
    """Return a codec id as the header's bytes, unpadded. Raises ``ValueError`` if too long."""
    field = codec_id.encode("ascii")
    if not 0 < len(field) <= MAX_CODEC_ID_BYTES:
        raise ValueError(f"codec id {codec_id!r} is not 1..{MAX_CODEC_ID_BYTES} ASCII characters")
    return field


def codec_in(blob: bytes | bytearray | memoryview | VerifiedBlob) -> bytes:
    """Return the codec id in a blob's header, unchecked; arbitrary bytes if it is no blob."""
    if isinstance(blob, VerifiedBlob):
        return blob.header.codec
    return bytes(blob[_CODEC]).rstrip(b"\0")


def kind_of(blob: bytes | bytearray | memoryview | VerifiedBlob) -> bytes:
    """Return the kind in a blob's header, unchecked; an arbitrary byte if it is no blob."""
    return blob.header.key[:1] if isinstance(blob, VerifiedBlob) else bytes(blob[_KIND])


def check_length(payload: memoryview, least: int) -> None:
    """Raise ``Corrupt`` if a payload has fewer than ``least`` bytes, which its tokens need."""
    if len(payload) < least:
        raise Corrupt("a blob claims more tokens than its bytes can hold")


def pack(header: Header, payload: bytes | memoryview) -> bytearray:
    """Return a blob; the payload is copied once. Raises ``ValueError`` if it is too large.

    The checksum and the copy of a large payload run without the GIL.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a payload of {len(payload)} bytes is over {MAX_PAYLOAD_BYTES}")
    head = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        header.key[:1],
        0,
        header.codec,
        header.fingerprint,
        header.key[1:],
        header.layout,
        header.first_token,
        header.num_tokens,
        len(payload),
    )
    blob = bytearray(HEADER_BYTES + len(payload))
    blob[:HEADER_BYTES] = head + _CRC.pack(_checksum(head, payload))
    np.frombuffer(blob, np.uint8)[HEADER_BYTES:] = np.frombuffer(payload, np.uint8)
    return blob


def parse(blob: bytes | bytearray | memoryview | VerifiedBlob) -> tuple[Header, memoryview]:
    """Return the header and the payload of a blob, verified. The payload is a view, not a copy.

    Raises:
        Corrupt: it is not a blob, has another length than it states, or a bit was changed.
        Mismatch: the blob has a version, flags or a kind that this code does not know.
    """
    if isinstance(blob, VerifiedBlob):
        return blob.header, blob.payload
    view = memoryview(blob).cast("B")
    if len(view) < HEADER_BYTES:
        raise Corrupt("shorter than a header")
    head = view[: _HEADER.size]
    fields = _HEADER.unpack(head)
    magic, version, kind, flags, codec, fingerprint, digest, layout, first, count, length = fields
    if magic != MAGIC:
        raise Corrupt("not a blob of the cold store")
    if version != FORMAT_VERSION or flags:
        raise Mismatch(f"blob of format {version}, flags {flags}: written by another release")
    if length != len(view) - HEADER_BYTES:
        raise Corrupt(f"{len(view) - HEADER_BYTES} payload bytes where {length} were written")
    payload = view[HEADER_BYTES:]
    if not is_authentic(view) and _checksum(head, payload) != _stated(view):
        raise Corrupt("checksum differs")
    if kind not in KINDS:
        raise Mismatch(f"blob of unknown kind {kind!r}")
    return Header(kind + digest, codec.rstrip(b"\0"), fingerprint, layout, first, count), payload


def expect(found: Header, wanted: Header) -> None:
    """Raise ``Mismatch``, with the first difference, unless a header is the wanted one."""
    if found != wanted:
        name = next(x for x in wanted._fields if getattr(found, x) != getattr(wanted, x))
        raise Mismatch(f"the blob's {name} is not the one asked for")


def _stated(view: memoryview) -> int:
    """Return the checksum that a blob's header states."""
    return int(_CRC.unpack_from(view, _HEADER.size)[0])


def _checksum(head: bytes | memoryview, payload: bytes | memoryview) -> int:
    return int(crc32c(payload, crc32c(head)))


assert KEY_BYTES == 33  # kind and digest have their fixed places in the header
