"""The record of a session: everything that the store remembers of it between its turns."""

from __future__ import annotations

import msgspec
import numpy as np

from kvstore.blobs.chain import CHUNK, DIGEST_BYTES, Tokens
from kvstore.errors import Corrupt
from kvstore.ledger.record import MAX_CODECS, StoredSession


class SessionRecord(StoredSession, frozen=True, kw_only=True):
    """A session as the cold store knows it; kept in the tiers beside its chunks.

    ``root`` is the one-way digest that the chain of keys starts from. With the tokens it determines
    the name of every blob of the session, so a session can be counted and forgotten without the
    tenant's salt.
    """

    fingerprint: str
    root: bytes
    token_ids: bytes  # little-endian int32, the whole chain
    tail_tokens: int  # tokens after the last full chunk
    snapshots: tuple[int, ...]  # ascending token positions of stored recurrent or rotating state
    # Digests of chunks that this session no longer uses since its history was edited. They can
    # still be found by content; ``forget`` removes them with the rest.
    left_behind: bytes = b""
    state_bytes: int = 0  # of ``packed_bytes``, snapshots

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def pinned_bytes(self) -> int:
        """Bytes that the session takes of the share for pins while it is pinned."""
        return self.packed_bytes + len(self.token_ids)

    @property
    def tokens(self) -> Tokens:
        """(num_tokens,) int32, read-only view."""
        return np.frombuffer(self.token_ids, "<i4")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SessionRecord)


def encode_record(record: SessionRecord) -> bytes:
    """Write the payload of the record's blob."""
    return _encoder.encode(record)


def decode_record(payload: memoryview) -> SessionRecord:
    """Read the record in a payload. Raises ``Corrupt``: not a record, or it contradicts itself."""
    try:
        record = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"not a session record: {error}") from error
    n = record.num_tokens
    whole = len(record.token_ids) == 4 * n and 0 <= record.tail_tokens <= n
    digests = (len(record.root), len(record.left_behind) % DIGEST_BYTES) == (DIGEST_BYTES, 0)
    if (
        len(record.codecs) > MAX_CODECS
        or not whole
        or not digests
        or any(not 0 < x <= n for x in record.snapshots)
    ):
        raise Corrupt("a session record contradicts itself")
    return record


def left_behind_keys(record: SessionRecord) -> list[bytes]:
    digests = record.left_behind
    return [CHUNK + digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]
