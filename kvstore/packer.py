"""From live KV to blobs and back: where codec, layout and format meet.

Every ``unpack_*`` checks first that the blob is the one asked for (key, model, codec, layout, token
range) and whole, and raises ``Unusable`` otherwise, before the caller can have seen a byte of it.
"""

from __future__ import annotations

from typing import Final

from kvstore import format as blobs
from kvstore.chain import DIGEST_BYTES
from kvstore.codecs.base import Codec
from kvstore.errors import Mismatch
from kvstore.records import SessionRecord, decode_record, encode_record
from kvstore.shapes import KVLayout, KVRun, slice_tokens
from kvstore.snapshot import StateTree, decode_state, encode_state
from kvstore.tiers.base import Blob
from kvstore.whole_rows import WholeRows

_RECORD_CODEC: Final = b"msgpack.1"


class Packer:
    """Stateless and thread-safe."""

    def __init__(self, codec: Codec, layout: KVLayout, fingerprint: str) -> None:
        codec.check(layout)
        self.codec = codec
        self.layout = layout
        self._rows = WholeRows(layout, codec.exact)
        self._codec_id = blobs.codec_field(codec.id)
        self._rows_id = blobs.codec_field(self._rows.codec_id)
        self.fingerprint = fingerprint
        self._fingerprint = blobs.fingerprint_digest(fingerprint)
        self._layout_digest = blobs.layout_digest(layout)

    def wrote(self, record: SessionRecord) -> bool:
        """The record's blobs are of this model and codec."""
        return (record.fingerprint, record.codec) == (self.fingerprint, self.codec.id)

    def chunk_nbytes(self, first_token: int, num_tokens: int) -> int:
        """Of a chunk's blob; exact unless rows need the codec's raw escape."""
        packed = self.codec.packed_nbytes(self.layout, num_tokens, first_token)
        return blobs.HEADER_BYTES + packed

    def tail_nbytes(self, num_tokens: int) -> int:
        return blobs.HEADER_BYTES + self._rows.nbytes(num_tokens)

    def pack_chunk(self, key: bytes, run: KVRun, first_token: int) -> bytes:
        """``run`` holds the chunk's tokens only; its views are read and not kept."""
        payload = self.codec.encode(run, self.layout, first_token)
        return self.seal_chunk(key, payload, first_token, _num_tokens(run))

    def seal_chunk(
        self, key: bytes, payload: bytes | memoryview, first_token: int, num_tokens: int
    ) -> bytes:
        """The blob of what the codec made of a chunk, on whichever device; copied once."""
        return blobs.pack(self._chunk_header(key, first_token, num_tokens), payload)

    def open_chunk(self, blob: Blob, key: bytes, first_token: int, num_tokens: int) -> memoryview:
        """The inverse: a view of the payload, which the codec has yet to check."""
        return _payload(blob, self._chunk_header(key, first_token, num_tokens))

    def unpack_chunk(
        self, blob: Blob, key: bytes, first_token: int, num_tokens: int, out: KVRun
    ) -> None:
        """Fill ``out`` with the first tokens of a chunk of ``num_tokens`` tokens."""
        payload = self.open_chunk(blob, key, first_token, num_tokens)
        taken = _num_tokens(out)
        if taken == num_tokens:
            self.codec.decode(payload, self.layout, first_token, out)
            return
        whole = self.layout.empty(num_tokens)
        self.codec.decode(payload, self.layout, first_token, whole)
        _copy(slice_tokens(whole, 0, taken), out)

    def pack_tail(self, key: bytes, run: KVRun, first_token: int) -> bytes:
        return self.seal_tail(key, self._rows.encode(run), first_token, _num_tokens(run))

    def seal_tail(
        self, key: bytes, payload: bytes | memoryview, first_token: int, num_tokens: int
    ) -> bytes:
        """As ``seal_chunk``, of rows as they are (``WholeRows``)."""
        return blobs.pack(self._rows_header(key, first_token, num_tokens), payload)

    def open_tail(self, blob: Blob, key: bytes, first_token: int, num_tokens: int) -> memoryview:
        """The rows as they are; of another length only if ``blob`` is not what it says."""
        return _payload(blob, self._rows_header(key, first_token, num_tokens))

    def unpack_tail(
        self, blob: Blob, key: bytes, first_token: int, num_tokens: int, out: KVRun
    ) -> None:
        """Fill ``out`` with the first tokens of a tail of ``num_tokens`` tokens."""
        payload = self.open_tail(blob, key, first_token, num_tokens)
        self._rows.decode(payload, num_tokens, out)

    def pack_snapshot(
        self, key: bytes, state: StateTree, run: KVRun, first_token: int, num_tokens: int
    ) -> bytes:
        """State after ``run``: the ``num_tokens`` tokens behind the last full chunk before it.

        A model without growing layers has an empty run.
        """
        header = self._rows_header(key, first_token, num_tokens)
        return blobs.pack(header, encode_state(state) + self._rows.encode(run))

    def unpack_snapshot(
        self, blob: Blob, key: bytes, first_token: int, num_tokens: int, out: KVRun
    ) -> StateTree:
        """Fill ``out`` (exactly ``num_tokens`` tokens) and give the state after them."""
        payload = self.open_tail(blob, key, first_token, num_tokens)
        cut = len(payload) - self._rows.nbytes(num_tokens)
        state = decode_state(payload[: max(cut, 0)])
        self._rows.decode(payload[cut:], num_tokens, out)
        return state

    def pack_record(self, key: bytes, record: SessionRecord) -> bytes:
        return blobs.pack(self._record_header(key, record), encode_record(record))

    def unpack_record(self, blob: Blob, key: bytes) -> SessionRecord:
        """A record of this session by whatever model; the caller compares ``root``."""
        header, payload = blobs.parse(blob)
        record = decode_record(payload)
        if header.key != key or header.codec != _RECORD_CODEC:
            raise Mismatch("the record is of another session")
        return record

    def _chunk_header(self, key: bytes, first_token: int, num_tokens: int) -> blobs.Header:
        return self._header(key, self._codec_id, first_token, num_tokens)

    def _rows_header(self, key: bytes, first_token: int, num_tokens: int) -> blobs.Header:
        return self._header(key, self._rows_id, first_token, num_tokens)

    def _record_header(self, key: bytes, record: SessionRecord) -> blobs.Header:
        return self._header(key, _RECORD_CODEC, 0, record.num_tokens)

    def _header(self, key: bytes, codec: bytes, first: int, count: int) -> blobs.Header:
        assert len(key) == 1 + DIGEST_BYTES
        return blobs.Header(key, codec, self._fingerprint, self._layout_digest, first, count)


def _num_tokens(run: KVRun) -> int:
    return int(run[0][0].shape[1]) if len(run) else 0


def _payload(blob: Blob, wanted: blobs.Header) -> memoryview:
    header, payload = blobs.parse(blob)
    blobs.expect(header, wanted)
    return payload


def _copy(source: KVRun, target: KVRun) -> None:
    for (from_k, from_v), (to_k, to_v) in zip(source, target, strict=True):
        to_k[...] = from_k
        to_v[...] = from_v
