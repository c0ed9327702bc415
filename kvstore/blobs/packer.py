"""Converts live KV to blobs and back with the codecs of a store.

Every ``unpack_*`` first verifies that the blob is the requested one (key, model, layout, token
range), is undamaged, and is of a known codec. Otherwise it raises ``Unusable`` and returns nothing
of it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, TypeVar

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import CHUNK, KEY_BYTES, STATE, WINDOW, Piece
from kvstore.blobs.state_packer import check_matrices, pack_matrices, unpack_matrices
from kvstore.blobs.state_tree import StateTree, decode_state, encode_state
from kvstore.codecs.base import NUM_SINKS, Codec, RawCodec
from kvstore.codecs.profile import Profile
from kvstore.codecs.rows import sinks
from kvstore.codecs.session_codec import SessionCodec
from kvstore.errors import ForeignCodec, Mismatch, RefusedCodec
from kvstore.shapes import KVLayout, KVRun, StoredModel, slice_tokens, tokens_in
from kvstore.tiers.base import Blob

RAW: Final = RawCodec()
RECORD_CODEC: Final = b"msgpack.2"
EXACT_STATE: Final = b"state.1"
PACKED_STATE: Final = b"state.1+matrices"
ROWS: Final = frozenset((CHUNK, WINDOW))  # kinds of blobs that hold rows
_NO_LAYERS: Final = KVLayout("float32", ())
# A ``VerifiedBlob`` was checked before and is not checked again.
AnyBlob: TypeAlias = Blob | blobs.VerifiedBlob
C = TypeVar("C", Codec, SessionCodec)


@dataclass(frozen=True)
class StoreCodecs:
    """The codecs with which a store packs, and those that it can also read.

    To adopt another codec changes only how new blobs are packed: the header of each blob names its
    codec, and old blobs are read with that one. Codecs with the same id are the same.

    Args:
        rows: packs the rows of layers that keep all tokens.
        session: packs the windows and matrices of a model with states; None = they are stored
            exactly.
        readable: further codecs of rows that can be read; ``rows`` always can.
        readable_sessions: further codecs of windows and matrices that can be read.
        profile: the arrays that ``rows`` and ``session`` learned from the model, for servers that
            lack them; None if they learned nothing.
    """

    rows: Codec
    session: SessionCodec | None = None
    readable: tuple[Codec, ...] = ()
    readable_sessions: tuple[SessionCodec, ...] = ()
    profile: Profile | None = field(default=None, compare=False, repr=False)

    @property
    def windows(self) -> Codec:
        """The codec that packs window rows; ``RAW`` if they are stored exactly."""
        return (self.session.windows if self.session else None) or RAW

    @property
    def packs_matrices(self) -> bool:
        return self.session is not None and not self.session.matrices.exact

    @property
    def exact(self) -> bool:
        """True if whole sessions are restored bit for bit."""
        return self.rows.exact and (self.session is None or self.session.exact)

    def with_readable(self, other: StoreCodecs) -> StoreCodecs:
        """Return these codecs with all codecs of ``other`` readable as well."""
        return replace(
            self,
            readable=distinct((*self.readable, other.rows, *other.readable)),
            readable_sessions=distinct((*self.sessions, *other.sessions)),
        )

    @property
    def written_ids(self) -> list[str]:
        """The ids of the lossy codecs that pack, as headers of blobs and states name them."""
        parts = (self.rows, self.windows, *((self.session.matrices,) if self.session else ()))
        return [x.id for x in parts if not x.exact]

    @property
    def known(self) -> tuple[Codec, ...]:
        """All codecs of rows that can be read, the one that packs first."""
        return distinct((self.rows, *self.readable))

    @property
    def sessions(self) -> tuple[SessionCodec, ...]:
        """All codecs of windows and matrices that can be read, the one that packs first."""
        own = () if self.session is None else (self.session,)
        return distinct((*own, *self.readable_sessions))


def distinct(codecs: Iterable[C]) -> tuple[C, ...]:
    """Keep the first codec of each id."""
    found: dict[str, C] = {}
    for codec in codecs:
        found.setdefault(codec.id, codec)
    return tuple(found.values())


def as_codecs(codecs: Codec | StoreCodecs) -> StoreCodecs:
    return codecs if isinstance(codecs, StoreCodecs) else StoreCodecs(codecs)


@dataclass(frozen=True)
class _Known:
    """The codecs in use; replaced as a whole when others are adopted."""

    own: StoreCodecs
    others: Sequence[StoreCodecs]  # of other stores
    codecs: StoreCodecs  # ``own``, with those of ``others`` readable
    by_name: Mapping[bytes, Codec]  # of rows of layers that keep all tokens, by id
    windows_by_name: Mapping[bytes, Codec]  # of window rows, by id
    # The least size of a payload, by kind, codec, number of tokens and first token.
    least: dict[tuple[bytes, bytes, int, int], int] = field(default_factory=dict)

    def of(self, kind: bytes) -> Mapping[bytes, Codec]:
        """Return the readable codecs, by id, of rows in a kind of blob."""
        return self.windows_by_name if kind == WINDOW else self.by_name


class Packer:
    """Packs live KV into blobs and unpacks them.

    Thread-safe: its only state is the set of codecs, which is replaced as a whole.
    """

    def __init__(self, codecs: Codec | StoreCodecs, model: StoredModel) -> None:
        """Raise ``UnknownCodec`` if a codec does not support the model's layout."""
        self.layout = model.layout
        self.windows = model.windows
        self.fingerprint = model.fingerprint
        self._fingerprint = blobs.fingerprint_digest(model.fingerprint)
        self._digests = {
            CHUNK: blobs.layout_digest(model.layout),
            WINDOW: blobs.layout_digest(model.windows or _NO_LAYERS),
        }
        self._known = self._checked(as_codecs(codecs), ())
        self._refused: frozenset[bytes] = frozenset()

    # ---- which codecs

    @property
    def codec(self) -> Codec:
        """The codec that packs rows of layers that keep all tokens."""
        return self._known.codecs.rows

    @property
    def codecs(self) -> StoreCodecs:
        return self._known.codecs

    @property
    def readable(self) -> tuple[str, ...]:
        """The ids of all codecs of rows that can be read, the one that packs first."""
        return tuple(x.id for x in self._known.by_name.values())

    def adopt(self, codecs: StoreCodecs, *, keep: bool) -> None:
        """Pack with these codecs from now on. Codecs of other stores stay readable.

        Args:
            keep: also keep reading with the former codecs; otherwise their blobs are refused.

        Raises:
            UnknownCodec: a codec does not support the layout; nothing is changed.
        """
        own, others = self._known.own, self._known.others
        self._known = self._checked(codecs.with_readable(own) if keep else codecs, others)
        if not keep:
            before = self._checked(own, ())
            self._refused |= {*before.by_name, *before.windows_by_name}

    def read_too(self, others: Sequence[StoreCodecs]) -> None:
        """Set the codecs of other stores that can be read, in place of those set before.

        Raises:
            UnknownCodec: a codec does not support the layout; nothing is changed.
        """
        self._known = self._checked(self._known.own, others)

    def _checked(self, own: StoreCodecs, others: Sequence[StoreCodecs]) -> _Known:
        codecs = functools.reduce(StoreCodecs.with_readable, others, own)
        for codec in codecs.known:
            codec.check(self.layout)
        windows = [x.windows for x in codecs.sessions if x.windows is not None]
        return _Known(
            own,
            others,
            codecs,
            {blobs.codec_field(x.id): x for x in codecs.known},
            {blobs.codec_field(x.id): x for x in (*windows, RAW)},
        )

    def layout_of(self, kind: bytes) -> KVLayout:
        """Return the layout of the rows in a blob of this kind: chunk or window."""
        return (self.windows or _NO_LAYERS) if kind == WINDOW else self.layout

    def writer_of(self, kind: bytes) -> Codec:
        """Return the codec that packs rows of this kind now."""
        return self.codecs.windows if kind == WINDOW else self.codec

    def is_lossy(self, blob: AnyBlob) -> bool:
        """Return whether the blob is of a lossy codec or of an unknown one."""
        kind, name = blobs.kind_of(blob), blobs.codec_in(blob)
        if kind == STATE:
            return name != EXACT_STATE
        codec = self._known.of(kind).get(name)
        return codec is None or not codec.exact

    def verify(self, blob: Blob, piece: Piece) -> blobs.VerifiedBlob:
        """Verify that a blob is undamaged, the one that ``piece`` names, and of a known codec.

        Raises:
            Mismatch: it has another key, other tokens, or is of another model or layout.
            ForeignCodec: it is of a codec or a profile that this store does not have.
            Corrupt: it is damaged, claims more tokens than it can hold, or is no packed state.
        """
        header, payload = blobs.parse(blob)
        blobs.expect(header, self._header(piece, header.codec))
        kind = piece.key[:1]
        if kind in ROWS:
            blobs.check_length(payload, self._least_nbytes(kind, header))
        elif header.codec == PACKED_STATE:
            check_matrices(decode_state(payload), self._matrices)
        return blobs.VerifiedBlob(blob, header, payload)

    def _least_nbytes(self, kind: bytes, header: blobs.Header) -> int:
        """Return the least size of a payload of rows.

        It is computed once for all blobs that differ only in their position after the sinks.
        """
        place, known = min(header.first_token, NUM_SINKS), self._known.least
        key = kind, header.codec, header.num_tokens, place
        if (least := known.get(key)) is None:
            codec, layout = self._reader(kind, header.codec), self.layout_of(kind)
            least = known[key] = sinks.least_nbytes(codec, layout, header.num_tokens, place)
        return least

    # ---- rows: chunks, and the window rows of chunks

    def rows_nbytes(self, first_token: int, num_tokens: int) -> int:
        """Return the size of a chunk's blob; an estimate if the codec has an entropy coder.

        A blob is longer only if some rows have to be stored unquantised.
        """
        packed = sinks.packed_nbytes(self.codec, self.layout, num_tokens, first_token)
        return blobs.HEADER_BYTES + packed

    def pack_rows(self, piece: Piece, run: KVRun, codec: Codec | None = None) -> bytearray:
        """Return the blob of a chunk or of its window rows; keeps no reference to ``run``.

        Args:
            run: for each layer K and V, each (num_kv_heads, num_tokens, head_dim), in the engine's
                dtype (bf16 as uint16), of these tokens only.
            codec: one of ``codecs``; None = ``writer_of`` this kind.
        """
        assert tokens_in(run) == piece.num_tokens
        kind = piece.key[:1]
        codec = codec or self.writer_of(kind)
        payload = sinks.encode(codec, run, self.layout_of(kind), piece.first_token)
        return self.blob_of_rows(piece, payload, codec)

    def blob_of_rows(self, piece: Piece, payload: bytes | memoryview, codec: Codec) -> bytearray:
        """Return the blob of a payload that ``codec`` packed, on the CPU or a GPU."""
        return blobs.pack(self._header(piece, blobs.codec_field(codec.id)), payload)

    def open_rows(self, blob: AnyBlob, piece: Piece) -> tuple[Codec, memoryview]:
        """Return the codec and the payload of a blob of rows.

        The payload is a view whose content the codec has not checked.

        Raises:
            Unusable: the blob is damaged, not the requested one, or of an unknown codec.
        """
        header, payload = blobs.parse(blob)
        blobs.expect(header, self._header(piece, header.codec))
        return self._reader(piece.key[:1], header.codec), payload

    def unpack_rows(self, blob: AnyBlob, piece: Piece, out: KVRun) -> None:
        """Unpack all rows of a blob into ``out``, of the shapes of ``run`` in ``pack_rows``.

        Raises:
            Unusable: the blob is damaged, not the requested one, or of an unknown codec.
        """
        assert tokens_in(out) == piece.num_tokens
        codec, payload = self.open_rows(blob, piece)
        sinks.decode(codec, payload, self.layout_of(piece.key[:1]), piece.first_token, out)

    def unpack_chunks(self, chunks: Sequence[tuple[AnyBlob, Piece]], out: KVRun) -> None:
        """Unpack consecutive chunks into ``out``, with one call for those of the same codec.

        Raises:
            Unusable: a blob is damaged, not the requested one, or of an unknown codec.
        """
        kind, first = chunks[0][1].key[:1], chunks[0][1].first_token
        opened = [(*self.open_rows(blob, piece), piece) for blob, piece in chunks]
        for codec, group in itertools.groupby(opened, key=operator.itemgetter(0)):
            _, payloads, pieces = zip(*group, strict=True)
            begin = pieces[0].first_token
            rows = slice_tokens(out, begin - first, pieces[-1].end_token - first)
            sinks.decode_chunks(codec, payloads, self.layout_of(kind), begin, rows)

    def _reader(self, kind: bytes, name: bytes) -> Codec:
        codec = self._known.of(kind).get(name)
        if codec is None:
            words = name.decode("ascii", "replace")
            kind_of_error = RefusedCodec if name in self._refused else ForeignCodec
            raise kind_of_error(f"the blob is of codec {words!r}, unknown here", words)
        return codec

    # ---- states, and the headers of records

    def pack_state(self, piece: Piece, tree: StateTree) -> bytearray:
        """Return the blob of a state without its window rows (``state_packer.without_windows``)."""
        codecs = self.codecs
        if codecs.session is None or not codecs.packs_matrices:
            return blobs.pack(self._header(piece, EXACT_STATE), encode_state(tree))
        packed = pack_matrices(tree, codecs.session.matrices)
        return blobs.pack(self._header(piece, PACKED_STATE), encode_state(packed))

    def unpack_state(self, blob: AnyBlob, piece: Piece) -> StateTree:
        """Return the state in a blob, without its window rows.

        Raises:
            Unusable: the blob is damaged, not the requested one, or of an unknown codec.
        """
        header, payload = blobs.parse(blob)
        if header.codec not in (EXACT_STATE, PACKED_STATE):
            raise Mismatch(f"a state is of codec {header.codec!r}, unknown here")
        blobs.expect(header, self._header(piece, header.codec))
        tree = decode_state(payload)
        if header.codec == EXACT_STATE:
            return tree
        return unpack_matrices(tree, self._matrices)

    @property
    def _matrices(self) -> list[str]:
        """The ids of all codecs of matrices that can be read."""
        return [x.matrices.id for x in self.codecs.sessions]

    def record_header(self, key: bytes, codec: bytes = RECORD_CODEC) -> blobs.Header:
        """Return the header for the blob of a session's record, or of a page of its chain."""
        return self._header(Piece(key, 0, 0), codec)

    def _header(self, piece: Piece, codec: bytes) -> blobs.Header:
        assert len(piece.key) == KEY_BYTES
        digest = self._digests[WINDOW if piece.is_window else CHUNK]
        first, count = piece.first_token, piece.num_tokens
        return blobs.Header(piece.key, codec, self._fingerprint, digest, first, count)
