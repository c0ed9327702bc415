"""Packs blobs, in idle moments, that are stored exactly although the store has a codec for them.

Until a model is measured its sessions are stored exactly. Once a lossy codec is adopted, such blobs
are packed for the first time, under their own names. Blobs that were ever packed with loss stay as
they are. The record gets its new sizes last. So the process may end at any moment, and the next one
continues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import Piece
from kvstore.blobs.packer import Packer
from kvstore.errors import Unusable
from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.notices import StoreNotice
from kvstore.ledger.record import SessionRecord
from kvstore.ledger.stack import TierStack
from kvstore.ledger.writing import Committer
from kvstore.session import SessionRef
from kvstore.stats import Counters, Repacking
from kvstore.tiers.base import Blob
from kvstore.workers import lower_priority

LOOK_S: Final = 0.25  # while the machine is busy, how often to check whether it still is
# Refused blobs, and sessions that came from another engine, are looked at again after this time.
AGAIN_S: Final = 600.0

_log = logging.getLogger(__name__)


def packed_again(packer: Packer, blob: Blob, piece: Piece) -> Blob | None:
    """Pack an exact blob; None if it has been through a lossy codec, or does not get smaller.

    Raises:
        Unusable: the blob is damaged, not the requested one, or in an unknown codec.
    """
    verified = packer.verify(blob, piece)
    if packer.is_lossy(verified):
        return None
    if piece.is_state:
        packed = packer.pack_state(piece, packer.unpack_state(verified, piece))
    else:
        run = packer.layout_of(piece.key[:1]).empty(piece.num_tokens)
        packer.unpack_rows(verified, piece, run)
        packed = packer.pack_rows(piece, run)
    return packed if len(packed) < len(blob) else None


class Repacker:
    """Owns a thread of the lowest priority once it has begun. Thread-safe."""

    def __init__(
        self,
        stack: TierStack,
        index: SessionIndex,
        committer: Committer,
        claims: Claims,
        packer: Packer,
        counters: Counters,
        report: Callable[[StoreNotice], None],
    ) -> None:
        self._stack = stack
        self._index = index
        self._committer = committer
        self._claims = claims
        self._packer = packer
        self._counters = counters
        self._is_idle: Callable[[], bool] = lambda: False
        self._report = report
        self._woken = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._settled: set[bytes] = set()  # record keys of sessions with nothing left to pack
        self._left: dict[bytes, int] = {}  # by record key, bytes of the sessions still to be packed
        self._num_done = 0
        self._freed_bytes = 0

    @property
    def progress(self) -> Repacking:
        """Count the sessions and bytes left in this pass, and those done in all passes."""
        left = list(self._left.values())
        return Repacking(len(left), sum(left), self._num_done, self._freed_bytes)

    def begin(self, is_idle: Callable[[], bool]) -> None:
        """Pack from now on, whenever ``is_idle`` reports that the machine is free. Call once.

        It is called before each blob, on a thread of this object.
        """
        self._is_idle = is_idle
        self._woken.set()
        self._thread = threading.Thread(target=self._run, name="kvstore-repack", daemon=True)
        self._thread.start()

    def look_again(self) -> None:
        """Begin another pass, since another codec was adopted."""
        self._settled = set()
        self._woken.set()

    def close(self) -> None:
        """Stop; waits for the blob that is being packed."""
        self._closed.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        lower_priority()
        while not self._closed.is_set():
            self._woken.wait(AGAIN_S)
            self._woken.clear()
            try:
                self._pack_all()
            except Exception:  # the outermost frame of this thread: serving does not depend on it
                _log.exception("stored sessions could not be packed again")
            self._left = {}

    def _may_go_on(self) -> bool:
        """Wait until the machine is free; False once closed."""
        while not self._closed.is_set():
            if self._is_idle():
                return True
            self._closed.wait(LOOK_S)
        return False

    def _pack_all(self) -> None:
        settled = self._settled  # replaced by a new set when another codec is adopted
        self._left = {} if self._packer.codecs.exact else self._wanted(settled)
        for key in list(self._left):
            if not self._may_go_on():
                return
            if self._pack_session(key):
                settled.add(key)
            self._left.pop(key, None)

    def _wanted(self, settled: set[bytes]) -> dict[bytes, int]:
        """Choose the sessions to look at, the longest unused first: bytes by record key."""
        sizes = {self._index.key(x): x.packed_bytes for x in self._index.usable()}
        return {key: nbytes for key, nbytes in sizes.items() if key not in settled}

    # ---- one session

    def _pack_session(self, key: bytes) -> bool:
        """Pack a session's exact blobs; False if the session is to be looked at again."""
        record = self._index.get(key)
        if record is None:
            return True
        if self._goes_on_elsewhere(record):
            return False
        is_whole, freed = True, 0
        seen: SessionRecord | None = record
        owned = {*self._index.owned(record)}
        for piece in self._exact_pieces(record):
            if not self._may_go_on():
                return False
            with self._claims.claim(key):
                if (now := self._index.get(key)) is not seen:
                    seen, owned = now, {*self._index.owned(now)} if now else set()
                if piece.key in owned:
                    saved = self._pack_blob(piece, record.tenant)
                    is_whole = is_whole and saved is not None
                    freed += saved or 0
        self._freed_bytes += freed
        if freed:
            self._take_size(key)
            self._num_done += 1
            session = SessionRef(record.tenant, record.id, b"")
            self._report(StoreNotice(session, "packed", is_gone=False))
        return is_whole

    def _exact_pieces(self, record: SessionRecord) -> list[Piece]:
        """List the blobs that may be stored exactly and that the store packs with loss by now.

        Blobs of rows are judged by their length, without reading them. States, which are few and
        the largest, come first.
        """
        codecs = self._packer.codecs
        wanted = [
            x
            for x in self._index.records.pieces(record)
            if (x.is_state and codecs.packs_matrices)
            or (x.is_chunk and not codecs.rows.exact)
            or (x.is_window and not codecs.windows.exact)
        ]
        exact = {x.key: self._exact_nbytes(x) for x in wanted}
        found: set[bytes] = set()
        for level in range(len(self._stack)):
            lengths = self._stack.lengths(level, [x.key for x in wanted])
            pairs = zip(wanted, lengths, strict=True)
            found.update(x.key for x, n in pairs if n is not None and n >= exact[x.key])
        return sorted((x for x in wanted if x.key in found), key=lambda x: not x.is_state)

    def _exact_nbytes(self, piece: Piece) -> int:
        if piece.is_state:
            return 0
        layout = self._packer.layout_of(piece.key[:1])
        return blobs.HEADER_BYTES + layout.bytes_per_token * piece.num_tokens

    def _goes_on_elsewhere(self, record: SessionRecord) -> bool:
        """True if another engine wrote a newer record of the session, which must be kept."""
        there = self._index.find_shared(self._index.key(record))
        return (
            there is not None
            and there.last_used_s > record.last_used_s
            and there.chain != record.chain
        )

    def _pack_blob(self, piece: Piece, tenant: str) -> int | None:
        """Replace a blob's exact copies; return the bytes freed, None if a tier refused one."""
        packed: Blob | None = None
        freed, is_refused = 0, False
        for level in range(len(self._stack)):
            blob = self._stack.find(level, [piece.key])[0]
            if blob is None or self._packer.is_lossy(blob):
                continue
            packed = packed or self._packed(blob, piece)
            if packed is None:
                return 0
            if self._stack.replace(level, piece.key, packed, tenant):
                self._counters.add("repacked_blobs")
                freed += len(blob) - len(packed)
            else:
                is_refused = True
        return None if is_refused else freed

    def _packed(self, blob: Blob, piece: Piece) -> Blob | None:
        try:
            return packed_again(self._packer, blob, piece)
        except Unusable:  # a restore finds that, too, and removes the copy
            return None

    def _take_size(self, key: bytes) -> None:
        """Write the present size of the blobs into the session's record."""
        with self._claims.claim(key):
            record = self._index.get(key)
            if record is not None:
                nbytes = self._stack.nbytes(self._index.records.sized_keys(record))
                self._committer.rewrite(replace(record, packed_bytes=nbytes))
