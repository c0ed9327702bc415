"""Packs blobs that are stored exactly, in idle moments, once the store has a lossy codec.

Until a model is measured its sessions are stored exactly. Once a lossy codec is adopted, such blobs
are packed for the first time and keep their keys. Blobs that were ever packed with loss stay as
they are. The size in the session's record is updated last. So the process may end at any moment,
and the next one continues.
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

LOOK_S: Final = 0.25  # while the machine is busy, time between checks whether it still is
# Sessions with blobs that a tier refused, or with a newer record of another engine, are tried again
# after this time.
AGAIN_S: Final = 600.0

_log = logging.getLogger(__name__)


def packed_again(packer: Packer, blob: Blob, piece: Piece) -> Blob | None:
    """Return an exact blob packed with loss; None if it is lossy already or gets no smaller.

    Raises:
        Unusable: the blob is damaged, not the requested one, or of an unknown codec.
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
    """Packs exact blobs on a thread of the lowest priority. Thread-safe.

    Args:
        report: called with a notice for each session that was packed.
    """

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
        """The sessions and bytes left in this pass, and those done in all passes."""
        left = list(self._left.values())
        return Repacking(len(left), sum(left), self._num_done, self._freed_bytes)

    def begin(self, is_idle: Callable[[], bool]) -> None:
        """Start the thread, which packs whenever ``is_idle`` returns True. Call once.

        ``is_idle`` is called on that thread, before each blob.
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
        """Return the sessions to look at, longest unused first: packed bytes by record key."""
        sizes = {self._index.key(x): x.packed_bytes for x in self._index.usable()}
        return {key: nbytes for key, nbytes in sizes.items() if key not in settled}

    # ---- one session

    def _pack_session(self, key: bytes) -> bool:
        """Pack a session's exact blobs; return False if the session has to be tried again."""
        record = self._index.get(key)
        if record is None:
            return True
        if self._is_newer_elsewhere(record):
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
        """Return the blobs that may be stored exactly and for which the store has a lossy codec.

        Rows are recognised by the length of their blob, without reading it. States come first,
        since they are few and the largest.
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
        """Return the least size of the blob if it is exact; 0 for states, which are always read."""
        if piece.is_state:
            return 0
        layout = self._packer.layout_of(piece.key[:1])
        return blobs.HEADER_BYTES + layout.bytes_per_token * piece.num_tokens

    def _is_newer_elsewhere(self, record: SessionRecord) -> bool:
        """Return whether another engine wrote a newer record of the session, which must be kept."""
        there = self._index.find_shared(self._index.key(record))
        return (
            there is not None
            and there.last_used_s > record.last_used_s
            and there.chain != record.chain
        )

    def _pack_blob(self, piece: Piece, tenant: str) -> int | None:
        """Replace a blob's exact copies in all tiers; return the bytes freed.

        None if a tier refused the packed blob.
        """
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
        except Unusable:  # left to a restore, which removes the bad copy
            return None

    def _take_size(self, key: bytes) -> None:
        """Write the size of the session's blobs, as they are now, into its record."""
        with self._claims.claim(key):
            record = self._index.get(key)
            if record is not None:
                nbytes = self._stack.nbytes(self._index.records.sized_keys(record))
                self._committer.rewrite(replace(record, packed_bytes=nbytes))
