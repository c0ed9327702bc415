"""Converts live KV to blobs and back, by codec, layout and format.

Every ``unpack_*`` first checks that the blob is the requested one (key, model, layout, token
range), is whole, and is in a known codec. Otherwise it raises ``Unusable``, before the caller can
have seen a byte of it.

A *run* of tokens is a chunk, the tail after the last full chunk, or the part of a block. All are
packed alike, by codecs that pack each token by itself, so the length of a run does not matter. KV
is packed by a lossy codec only once. If a run continues a lossy copy, the packed bytes of that
copy are taken over (``segments``). If those bytes are gone, the rows are kept in 16 bits, and the
name of their codec marks them as *restored*. Rows unpacked from them still count as lossy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from kvstore.blobs import format as blobs
from kvstore.blobs import segments as rows_in_segments
from kvstore.blobs.chain import CHUNK, DIGEST_BYTES, PART, SNAPSHOT, TAIL
from kvstore.blobs.codec_set import CodecSet, KnownCodecs, Rows, as_set, distinct
from kvstore.blobs.segments import FRESH, Lineage, Segment, ThinRows, WholeRows
from kvstore.blobs.snapshot import StateTree, decode_state, encode_state
from kvstore.blobs.state_packer import StatePacker
from kvstore.codecs.base import Codec
from kvstore.codecs.session_codec import SessionCodec
from kvstore.errors import Corrupt, Mismatch
from kvstore.shapes import KVLayout, KVRun, tokens_in
from kvstore.tiers.base import Blob

RECORD_CODEC: Final = b"msgpack.1"
PACKED_STATE: Final = b"+s1"  # ends the name of a snapshot's rows: its state is packed, too
SEGMENTS: Final = rows_in_segments.CODEC_ID.encode()
RUNS: Final = frozenset((CHUNK, TAIL, PART))  # kinds of blobs that hold rows and nothing else
_LENGTH: Final = struct.Struct("<Q")  # after packed rows of a snapshot: their bytes
# A ``VerifiedBlob`` was checked before and is not checked again.
AnyBlob: TypeAlias = Blob | blobs.VerifiedBlob


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
        whole = [WholeRows(layout, x, y) for x in (True, False) for y in (True, False)]
        self._whole_rows = {(x.exact, x.restored): x for x in whole}
        kinds: list[Rows] = [*whole, ThinRows(layout)]
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
    def exact_ids(self) -> tuple[str, ...]:
        """Ids of the readable codecs that are exact."""
        return tuple(x.id for x in self._known.by_name.values() if x.exact)

    @property
    def readable(self) -> tuple[str, ...]:
        """Ids of all codecs that can be read; those that are written come first."""
        return self._known.ids

    def adopt(self, codecs: CodecSet, *, keep: bool) -> None:
        """Pack by these codecs from now on; with ``keep``, still read what was readable before.

        Raises ``UnknownCodec``; then nothing has changed.
        """
        before = self._known
        more = before.by_name.values() if keep else ()
        self._known = self._checked(codecs, more, before.sessions.values() if keep else ())

    def _checked(
        self, codecs: CodecSet, more: Iterable[Codec], states: Iterable[SessionCodec]
    ) -> KnownCodecs:
        for codec in codecs.known:
            codec.check(self.layout)
        known = distinct((*codecs.known, *more))
        sessions = {x.id: x for x in (*codecs.sessions.values(), *states)}
        windows = [x.windows for x in sessions.values() if x.windows is not None]
        matrices = [x.matrices.id for x in sessions.values()]
        packer = StatePacker(self._windows, {x.id: x for x in windows}, matrices)
        by_name = {blobs.codec_field(x.id): x for x in known}
        return KnownCodecs(self.layout, self._rows, codecs, by_name, sessions, packer)

    def reads_any(self, codec_ids: Iterable[str]) -> bool:
        return not set(self.readable).isdisjoint(codec_ids)

    def reads_all(self, codec_ids: Iterable[str]) -> bool:
        return set(self.readable).issuperset(codec_ids)

    def check_codecs(self, blob: blobs.VerifiedBlob) -> None:
        """Check that a run of tokens can be unpacked here.

        Raises:
            ForeignCodec: it is in a codec, or of a profile, that only another engine has.
            Corrupt: its segments cannot be read.
        """
        header = blob.header
        if header.key[:1] in RUNS:
            names = self._split(header.codec, blob.payload, header.first_token, header.num_tokens)
            for name in names:
                self._known.find(name.codec_id)

    def is_lossy(self, blob: AnyBlob) -> bool:
        """True if rows of this blob have been through a lossy codec, now or before."""
        name = blobs.codec_in(blob).removesuffix(PACKED_STATE)
        if name in self._rows:
            return self._rows[name].restored
        codec = self._known.by_name.get(name)
        return codec is None or not codec.exact

    # ---- runs of tokens: chunks, tails, parts

    def run_nbytes(self, first_token: int, num_tokens: int) -> int:
        """Bytes of a run's blob in the memory tier, packed at once.

        The figure is exact unless rows need the raw escape. For an entropy coder it is an estimate.
        """
        packed = self.codec.packed_nbytes(self.layout, num_tokens, first_token)
        return blobs.HEADER_BYTES + packed

    def pack_run(
        self,
        key: bytes,
        run: KVRun,
        first_token: int,
        codec: Codec | None = None,
        lineage: Lineage = FRESH,
    ) -> bytearray:
        """Pack a run of tokens; keeps no reference to its views.

        Args:
            run: for each layer K and V, each (num_kv_heads, num_tokens, head_dim), in the engine's
                dtype (bf16 as uint16), of these tokens only.
            codec: one of ``codecs``; the memory tier's if omitted.
            lineage: the lossy copies that these rows continue.
        """
        codec, num_tokens = codec or self.codec, tokens_in(run)
        squeezes = not codec.exact and rows_in_segments.squeezes(self.layout, first_token)
        if lineage.position <= first_token and not squeezes:
            if codec.exact and key[:1] != CHUNK:
                return self._seal_rows(self._whole(exact=True), key, run, first_token)
            return self.seal_run(
                key, codec.encode(run, self.layout, first_token), first_token, num_tokens, codec
            )
        if codec.exact:
            return self._seal_rows(self._whole(exact=True, restored=True), key, run, first_token)
        found = rows_in_segments.pack(run, self.layout, first_token, codec, lineage)
        return self.seal_segments(key, found, first_token, num_tokens)

    def seal_run(
        self,
        key: bytes,
        payload: bytes | memoryview,
        first_token: int,
        num_tokens: int,
        codec: Codec | None = None,
    ) -> bytearray:
        """Make the blob of a run from the payload that its codec made, on whichever device."""
        codec_id = blobs.codec_field((codec or self.codec).id)
        return blobs.pack(self._header(key, codec_id, first_token, num_tokens), payload)

    def seal_segments(
        self, key: bytes, segments: Sequence[Segment], first_token: int, num_tokens: int
    ) -> bytearray:
        """Make the blob of a run from segments that cover it; one segment alone needs no head."""
        header = self._header(key, SEGMENTS, first_token, num_tokens)
        if len(segments) == 1 and segments[0].num_tokens == num_tokens:
            header = replace(header, codec=segments[0].codec_id.encode())
            return blobs.pack(header, segments[0].payload)
        return blobs.pack(header, rows_in_segments.join(segments, first_token))

    def open_run(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int, codec: Codec
    ) -> memoryview:
        """Return the payload of a run that is in ``codec``: a view, not checked by the codec yet.

        Raises:
            Unusable: damaged, or not the requested blob.
        """
        codec_id = blobs.codec_field(codec.id)
        header, payload = blobs.parse(blob)
        blobs.expect(header, self._header(key, codec_id, first_token, num_tokens))
        return payload

    def unpack_run(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int, out: KVRun
    ) -> None:
        """Fill ``out`` with the first tokens of a run of ``num_tokens`` tokens, in any codec.

        Args:
            out: as ``run`` of ``pack_run``, for as many tokens as are needed.

        Raises:
            Unusable: damaged, not the requested blob, or in a codec that is not known.
        """
        self._fill(self.open_segments(blob, key, first_token, num_tokens), first_token, out)

    def open_segments(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int
    ) -> list[Segment]:
        """Return the segments of a run: their payloads are views, not checked by a codec yet.

        Raises:
            Unusable: damaged, not the requested blob, or not a run of tokens.
        """
        header, payload = blobs.parse(blob)
        blobs.expect(header, self._header(key, header.codec, first_token, num_tokens))
        if key[:1] not in RUNS:
            raise Mismatch("not a run of tokens")
        return self._split(header.codec, payload, first_token, num_tokens)

    def _split(
        self, codec: bytes, payload: memoryview, first_token: int, num_tokens: int
    ) -> list[Segment]:
        """Return the segments of rows under this codec name; most have one segment."""
        if codec == SEGMENTS:
            return rows_in_segments.split(payload, first_token, num_tokens)
        return [Segment(first_token, num_tokens, codec.decode("ascii", "replace"), payload)]

    def _fill(self, found: Sequence[Segment], first_token: int, out: KVRun) -> None:
        by, least = self._known.unpack, self._known.least_nbytes
        rows_in_segments.fill(found, self.layout, first_token, out, by, least)

    def check_length(self, blob: blobs.VerifiedBlob) -> None:
        """Raise ``Unusable`` if a blob claims more tokens than its bytes can hold."""
        header = blob.header
        name = header.codec.removesuffix(PACKED_STATE)
        for x in self._split(name, blob.payload, header.first_token, header.num_tokens):
            rows_in_segments.check_length(x, self._known.least_nbytes)

    def lossy_segments(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int
    ) -> list[Segment]:
        """List the segments of a blob's rows, as they are; none if no rows were packed with loss.

        Raises ``Unusable``: damaged, not the requested blob, or in a codec that is not known.
        """
        if not self.is_lossy(blob):
            return []
        if key[:1] != SNAPSHOT:
            found = self.open_segments(blob, key, first_token, num_tokens)
        else:
            name, _, rows = self._open_snapshot(blob, key, first_token, num_tokens)
            found = self._split(name, rows, first_token, num_tokens)
        for segment in found:
            self._known.find(segment.codec_id)
        return found

    def _seal_rows(self, rows: WholeRows, key: bytes, run: KVRun, first_token: int) -> bytearray:
        header = self._header(key, rows.codec_id.encode(), first_token, tokens_in(run))
        return blobs.pack(header, rows.encode(run))

    def _whole(self, *, exact: bool, restored: bool = False) -> WholeRows:
        """Return the format of rows that are stored without a codec."""
        return self._whole_rows[exact, restored]

    # ---- states, and the headers of records

    def pack_snapshot(
        self,
        key: bytes,
        state: StateTree,
        run: KVRun,
        first_token: int,
        num_tokens: int,
        *,
        codec: Codec | None = None,
        rows: Lineage = FRESH,
        how: SessionCodec | None = None,
        lineage: Lineage = FRESH,
    ) -> bytearray:
        """Pack a state with the ``num_tokens`` tokens after the last full chunk before it.

        Args:
            run: those tokens; empty for a model without growing layers.
            codec, rows: of the run, as ``codec`` and ``lineage`` of ``pack_run``.
            how: packs the marked parts of the state; None = the whole state is kept exactly.
            lineage: the lossy copy that this state continues.
        """
        packs = how is not None and not how.exact
        restored = bool(num_tokens) and rows.position > first_token
        restored = restored or (lineage.position > 0 and not packs)
        name, packed = self._pack_rows(run, first_token, codec or self.codec, rows, restored)
        if how is not None and packs:
            position = first_token + num_tokens
            state = self._known.states.pack(how, state, position, lineage)
            name += PACKED_STATE
        payload = encode_state(state) + packed
        return blobs.pack(self._header(key, name, first_token, num_tokens), payload)

    def _pack_rows(
        self, run: KVRun, first_token: int, codec: Codec, lineage: Lineage, restored: bool
    ) -> tuple[bytes, bytes]:
        """Pack the rows of a snapshot, which follow its state; return their codec name, too."""
        if codec.exact or not tokens_in(run):
            whole = self._whole(exact=codec.exact, restored=restored)
            return whole.codec_id.encode(), whole.encode(run)
        joined = rows_in_segments.join(
            rows_in_segments.pack(run, self.layout, first_token, codec, lineage), first_token
        )
        return SEGMENTS, joined + _LENGTH.pack(len(joined))

    def unpack_snapshot(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int, out: KVRun
    ) -> StateTree:
        """Fill ``out`` (exactly ``num_tokens`` tokens) and return the state after them.

        Raises ``Unusable``: damaged, or not the requested blob.
        """
        name, packed, rows = self._open_snapshot(blob, key, first_token, num_tokens)
        state = decode_state(packed)
        if self.has_lossy_state(blob):
            state = self._known.states.unpack(state)
        self._fill(self._split(name, rows, first_token, num_tokens), first_token, out)
        return state

    def _open_snapshot(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int
    ) -> tuple[bytes, memoryview, memoryview]:
        """Return the codec name of a snapshot's rows, its packed state, and its rows."""
        header, payload = blobs.parse(blob)
        blobs.expect(header, self._header(key, header.codec, first_token, num_tokens))
        name, end = header.codec.removesuffix(PACKED_STATE), len(payload)
        rows = self._rows.get(name)
        if key[:1] != SNAPSHOT or (name != SEGMENTS and not isinstance(rows, WholeRows)):
            raise Mismatch(f"a state with rows in codec {header.codec!r}, not known here")
        if isinstance(rows, WholeRows):
            length = rows.nbytes(num_tokens)
        elif end < _LENGTH.size:
            raise Corrupt("a snapshot without its rows")
        else:
            end -= _LENGTH.size
            (length,) = _LENGTH.unpack_from(payload, end)
        if length > end:
            raise Corrupt("a snapshot's rows are longer than the snapshot")
        return name, payload[: end - length], payload[end - length : end]

    def has_lossy_state(self, blob: AnyBlob) -> bool:
        """True if the state in this snapshot has been through a lossy codec."""
        return blobs.codec_in(blob).endswith(PACKED_STATE)

    def segments_of(
        self, blob: AnyBlob, key: bytes, first_token: int, num_tokens: int
    ) -> list[Segment]:
        """List the packed segments of windows in a snapshot, as they are.

        Raises ``Unusable``: damaged, or not the requested blob.
        """
        _, packed, _ = self._open_snapshot(blob, key, first_token, num_tokens)
        if not self.has_lossy_state(blob):
            return []
        return self._known.states.segments_of(decode_state(packed))

    def record_header(self, key: bytes, num_tokens: int) -> blobs.Header:
        """The header of a session's record, which is a blob like any other."""
        return self._header(key, RECORD_CODEC, 0, num_tokens)

    def _header(self, key: bytes, codec: bytes, first: int, count: int) -> blobs.Header:
        assert len(key) == 1 + DIGEST_BYTES
        return blobs.Header(key, codec, self._fingerprint, self._layout_digest, first, count)
