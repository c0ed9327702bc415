"""Sessions as a ledger knows them, in a simulation: a count of tokens, cut into chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvstore.blobs.chain import CHUNK, RECORD, TAIL
from kvstore.ledger.record import StoredSession
from kvstore.tiers.base import Blob


class SpanRecord(StoredSession, frozen=True, kw_only=True):
    """A session of so many tokens."""

    stored_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.stored_tokens

    @property
    def pinned_bytes(self) -> int:
        return self.packed_bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SpanRecord)


class SpanRecords:
    """Answers a ledger's questions about such records: see ``kvstore.ledger.record.RecordKind``."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens

    def key(self, tenant: str, session_id: str) -> bytes:
        return RECORD + session_id.encode()

    def blob_keys(self, record: SpanRecord) -> list[bytes]:
        name, tail = record.id.encode(), record.stored_tokens % self.chunk_tokens
        chunks = [b"%b%b.%d" % (CHUNK, name, i) for i in range(self.num_chunks(record))]
        return [*chunks, b"%b%b.%d" % (TAIL, name, record.stored_tokens)] if tail else chunks

    def num_chunks(self, record: SpanRecord) -> int:
        """Count the full chunks."""
        return record.stored_tokens // self.chunk_tokens

    def num_spare(self, record: SpanRecord) -> int:
        return 0

    def first_blob(self, record: SpanRecord, blob_keys: Sequence[bytes]) -> bytes | None:
        return blob_keys[0] if blob_keys else None

    def left_behind(self, record: SpanRecord) -> Sequence[bytes]:
        return ()

    def resized(self, record: SpanRecord, sizes: Mapping[bytes, int]) -> SpanRecord:
        return msgspec.structs.replace(record, packed_bytes=sum(sizes.values()))

    def nbytes(self, record: SpanRecord) -> int:
        return 64

    def is_usable(self, record: SpanRecord) -> bool:
        return True

    def pack(self, record: SpanRecord) -> Blob:
        return _encoder.encode(record)

    def unpack(self, key: bytes, blob: Blob) -> SpanRecord:
        return _decoder.decode(blob)
