"""From live KV to blobs and back: where codec, layout and format meet.

Every ``unpack_*`` checks first that the blob is the one asked for (key, model, layout, token range)
and whole, and in a codec that is known, and raises ``Unusable`` otherwise, before the caller can
have seen a byte of it.

KV is packed by a lossy codec once. Rows that came from such a copy are never given to a lossy codec
again: a chunk that has any of them and is held nowhere (its copies were evicted, or an edited
history left it half-way) is kept as rows, like a tail. Its header says that they were *restored*,
and so does that of a tail with such rows: what comes out of it still counts as lossy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import CHUNK, DIGEST_BYTES, SNAPSHOT
from kvstore.blobs.codec_set import CodecSet, as_set, distinct
from kvstore.blobs.snapshot import StateTree, decode_state, encode_state
from kvstore.blobs.state_packer import FRESH, Lineage, Segment, StatePacker
from kvstore.blobs.whole_rows import WholeRows
from kvstore.codecs.base import Codec
from kvstore.codecs.states.session_codec import SessionCodec
from kvstore.errors import ForeignCodec, Mismatch
from kvstore.shapes import KVLayout, KVRun, slice_tokens
from kvstore.tiers.base import Blob

RECORD_CODEC: Final = b"msgpack.1"
PACKED_STATE: Final = b"+s1"  # behind the name of a snapshot's rows: its state is packed, too
# One that was checked before is not checked again.
AnyBlob: TypeAlias = Blob | blobs.VerifiedBlob


@dataclass(frozen=True)
class _Known:
    """The codecs of one moment, by the names that headers have for them."""

    codecs: CodecSet
    by_name: Mapping[bytes, Codec]
    # All codecs of states that may be read, by the ids that they have as a whole.
    sessions: Mapping[str, SessionCodec]
    states: StatePacker

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(x.id for x in self.by_name.values())


class Packer:
    """Makes blobs of live KV and live KV of blobs.

    Thread-safe: its only state is the set of codecs, which is replaced as a whole.
    """

    def __init__(
        self,
        codecs: Codec | CodecSet,
        layout: KVLayout,
        fingerprint: str,
        windows: KVLayout | None = None,
    ) -> None:
        """Raise ``UnknownCodec`` if a codec cannot take this layout.

        ``windows``: the layers whose rows a state may keep packed.
        """
        self.layout = layout
        self._windows = windows
        kinds = [WholeRows(layout, x, y) for x in (True, False) for y in (True, False)]
        self._rows = {x.codec_id.encode(): x for x in kinds}
        self.fingerprint = fingerprint
        self._fingerprint = blobs.fingerprint_digest(fingerprint)
        self._layout_digest = blobs.layout_digest(layout)
        self._known = self._checked(as_set(codecs), (), ())

    # ---- which codecs

    @property
    def codec(self) -> Codec:
        """The codec of the memory tier."""
        return self._known.codecs.ram

    @property
    def codecs(self) -> CodecSet:
        return self._known.codecs

    @property
    def readable(self) -> tuple[str, ...]:
        """Ids of all codecs that can be read, those that are written first."""
        return self._known.ids

    def adopt(self, codecs: CodecSet, *, keep: bool) -> None:
        """Pack by these codecs from now on; ``keep``: and read what was readable before.

        Raises ``UnknownCodec``; then nothing has changed.
        """
        before = self._known
        more = before.by_name.values() if keep else ()
        self._known = self._checked(codecs, more, before.sessions.values() if keep else ())

    def _checked(
        self, codecs: CodecSet, more: Iterable[Codec], states: Iterable[SessionCodec]
    ) -> _Known:
        for codec in codecs.known:
            codec.check(self.layout)
        known = distinct((*codecs.known, *more))
        sessions = {x.id: x for x in (*codecs.sessions.values(), *states)}
        windows = [x.windows for x in sessions.values() if x.windows is not None]
        matrices = [x.matrices.id for x in sessions.values()]
        packer = StatePacker(self._windows, {x.id: x for x in windows}, matrices)
        return _Known(codecs, {blobs.codec_field(x.id): x for x in known}, sessions, packer)

    def reads_any(self, codec_ids: Iterable[str]) -> bool:
        return not set(self.readable).isdisjoint(codec_ids)

    def reads_all(self, codec_ids: Iterable[str]) -> bool:
        return set(self.readable).issuperset(codec_ids)

    def check_codec(self, header: blobs.Header) -> None:
        """Check that a chunk can be unpacked here.

        Raises ``ForeignCodec``: it is in a codec, or of a profile, that only another engine has.
        """
        is_chunk = header.key[:1] == CHUNK
        if is_chunk and header.codec not in self._known.by_name and header.codec not in self._rows:
            raise ForeignCodec(f"the blob is in codec {header.codec!r}, which is not known here")

    def is_lossy(self, blob: AnyBlob) -> bool:
        """True if rows of this chunk or tail have been through a lossy codec, now or before."""
        name = blobs.codec_in(blob).removesuffix(PACKED_STATE)
        if name in self._rows:
            return self._rows[name].restored
        codec = self._known.by_name.get(name)
        return codec is None or not codec.exact

    # ---- chunks

    def chunk_nbytes(self, first_token: int, num_tokens: int) -> int:
        """Bytes of a chunk's blob in memory; exact unless rows need the raw escape."""
        packed = self.codec.packed_nbytes(self.layout, num_tokens, first_token)
        return blobs.HEADER_BYTES + packed

    def tail_nbytes(self, num_tokens: int, codecs: Sequence[str] = ()) -> int:
        """Bytes of a tail's blob. ``codecs``: of the session's record, if it was saved before."""
        saved_by = self._known.by_name.get(codecs[0].encode()) if codecs else None
        rows = WholeRows(self.layout, (saved_by or self.codec).exact)
        return blobs.HEADER_BYTES + rows.nbytes(num_tokens)

    def pack_chunk(
        self, key: bytes, run: KVRun, first_token: int, codec: Codec | None = None
    ) -> bytes:
        """Pack a full chunk; the views in ``run`` are not kept.

        Args:
            run: for each layer K and V, each (num_kv_heads, num_tokens, head_dim), in the engine's
                dtype (bf16 as uint16), of the chunk's tokens only, as they were computed.
            codec: one of ``codecs``; memory's if there is none.
        """
        codec = codec or self.codec
        payload = codec.encode(run, self.layout, first_token)
        return self.seal_chunk(key, payload, first_token, _num_tokens(run), codec)

    def seal_chunk(
        self,
        key: bytes,
        payload: bytes | memoryview,
        first_token: int,
        num_tokens: int,
        codec: Codec | None = None,
    ) -> bytes:
        """Make the blob of what the codec made of a chunk, on whichever device."""
        codec_id = blobs.codec_field((codec or self.codec).id)
        return blobs.pack(self._header(key, codec_id, first_token, num_tokens), payload)

    def open_chunk(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int, codec: Codec
    ) -> memoryview:
        """Give the payload of a chunk that is in ``codec``: a view, not checked by the codec yet.

        Raises:
            Unusable: damaged, or not the blob asked for.
        """
        codec_id = blobs.codec_field(codec.id)
        return _payload(blob, self._header(key, codec_id, first_token, num_tokens))

    def unpack_chunk(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int, out: KVRun
    ) -> None:
        """Fill ``out`` with the first tokens of a chunk of ``num_tokens`` tokens, in any codec.

        Args:
            out: as ``run`` of ``pack_chunk``, for as many tokens as are wanted.

        Raises:
            Unusable: damaged, not the blob asked for, or in a codec that is not known.
        """
        header, payload = blobs.parse(blob)
        blobs.expect(header, self._header(key, header.codec, first_token, num_tokens))
        if key[:1] != CHUNK:
            raise Mismatch("not a chunk")
        if header.codec in self._rows:
            self._rows[header.codec].decode(payload, num_tokens, out)
            return
        self.check_codec(header)
        codec, taken = self._known.by_name[header.codec], _num_tokens(out)
        if taken == num_tokens:
            codec.decode(payload, self.layout, first_token, out)
            return
        whole = self.layout.empty(num_tokens)
        codec.decode(payload, self.layout, first_token, whole)
        _copy(slice_tokens(whole, 0, taken), out)

    # ---- rows as they are: tails, and chunks that were restored from a lossy copy

    def pack_tail(
        self, key: bytes, run: KVRun, first_token: int, *, restored: bool = False
    ) -> bytes:
        rows = self._whole(restored)
        return self._seal_rows(rows, key, rows.encode(run), first_token, _num_tokens(run))

    def pack_restored(self, key: bytes, run: KVRun, first_token: int) -> bytes:
        """Keep a chunk or tail as rows, since some of them came from a lossy copy."""
        return self.pack_tail(key, run, first_token, restored=True)

    def _seal_rows(
        self, rows: WholeRows, key: bytes, payload: bytes, first_token: int, num_tokens: int
    ) -> bytes:
        codec = rows.codec_id.encode()
        return blobs.pack(self._header(key, codec, first_token, num_tokens), payload)

    def _open_rows(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int
    ) -> tuple[WholeRows, memoryview]:
        """Give the reader of whole rows, and their payload of unchecked length."""
        header, payload = blobs.parse(blob)
        blobs.expect(header, self._header(key, header.codec, first_token, num_tokens))
        codec = header.codec
        if key[:1] == SNAPSHOT:
            codec = codec.removesuffix(PACKED_STATE)
        if codec not in self._rows:
            raise Mismatch(f"rows in codec {header.codec!r}, which is not known here")
        return self._rows[codec], payload

    def unpack_tail(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int, out: KVRun
    ) -> None:
        """Fill ``out`` with the first tokens of a tail of ``num_tokens`` tokens.

        Raises ``Unusable``: damaged, or not the blob asked for.
        """
        rows, payload = self._open_rows(blob, key, first_token, num_tokens)
        rows.decode(payload, num_tokens, out)

    def _whole(self, restored: bool = False) -> WholeRows:
        """The kind of whole rows that is as exact as what memory keeps."""
        wanted = (self.codec.exact, restored)
        return next(x for x in self._rows.values() if (x.exact, x.restored) == wanted)

    # ---- states, and the headers of records

    def pack_snapshot(
        self,
        key: bytes,
        state: StateTree,
        run: KVRun,
        first_token: int,
        num_tokens: int,
        *,
        restored: bool = False,
        how: SessionCodec | None = None,
        lineage: Lineage = FRESH,
    ) -> bytes:
        """Pack a state with the ``num_tokens`` tokens behind the last full chunk before it.

        Args:
            run: those tokens; empty for a model without growing layers.
            how: packs the state as far as it is marked; None = it is kept exactly.
            lineage: the lossy copy that this state goes on from.
        """
        rows = self._whole(restored)
        name = rows.codec_id.encode()
        if how is not None and not how.exact:
            position = first_token + num_tokens
            state = self._known.states.pack(how, state, position, lineage)
            name += PACKED_STATE
        payload = encode_state(state) + rows.encode(run)
        return blobs.pack(self._header(key, name, first_token, num_tokens), payload)

    def unpack_snapshot(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int, out: KVRun
    ) -> StateTree:
        """Fill ``out`` (exactly ``num_tokens`` tokens) and give the state after them.

        Raises ``Unusable``: damaged, or not the blob asked for.
        """
        rows, payload = self._open_rows(blob, key, first_token, num_tokens)
        cut = len(payload) - rows.nbytes(num_tokens)
        state = decode_state(payload[: max(cut, 0)])
        if self.has_lossy_state(blob):
            state = self._known.states.unpack(state)
        rows.decode(payload[cut:], num_tokens, out)
        return state

    def has_lossy_state(self, blob: AnyBlob) -> bool:
        """True if the state in this snapshot has been through a lossy codec."""
        return blobs.codec_in(blob).endswith(PACKED_STATE)

    def segments_of(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int
    ) -> list[Segment]:
        """List the packed segments of windows in a snapshot, as they are.

        Raises ``Unusable``: damaged, or not the blob asked for.
        """
        rows, payload = self._open_rows(blob, key, first_token, num_tokens)
        if not self.has_lossy_state(blob):
            return []
        state = decode_state(payload[: max(len(payload) - rows.nbytes(num_tokens), 0)])
        return self._known.states.segments_of(state)

    def record_header(self, key: bytes, num_tokens: int) -> blobs.Header:
        """The header of a session's record, which is a blob like any other."""
        return self._header(key, RECORD_CODEC, 0, num_tokens)

    def _header(self, key: bytes, codec: bytes, first: int, count: int) -> blobs.Header:
        assert len(key) == 1 + DIGEST_BYTES
        return blobs.Header(key, codec, self._fingerprint, self._layout_digest, first, count)


def _num_tokens(run: KVRun) -> int:
    return int(run[0][0].shape[1]) if len(run) else 0


def _payload(blob: AnyBlob, wanted: blobs.Header) -> memoryview:
    header, payload = blobs.parse(blob)
    blobs.expect(header, wanted)
    return payload


def _copy(source: KVRun, target: KVRun) -> None:
    for (from_k, from_v), (to_k, to_v) in zip(source, target, strict=True):
        to_k[...] = from_k
        to_v[...] = from_v
