"""Packs blobs again, in idle moments, that are stored unpacked although their tier has a codec.

Until a model is measured its sessions are stored exactly, and older releases left tails as rows.
Once a tier has a lossy codec, such copies are packed for the first time. Copies that were ever
packed with loss, and rows that came from one, stay as they are. A session's record names the codec
before any of its blobs is in it, so forgetting the session finds them. Each blob is exchanged in
one step if the tier has such an operation. The record gets its new sizes last. So the process may
end at any moment, and the next one continues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic

import msgspec

from kvstore.blobs import format as blobs
from kvstore.blobs.chain import CHUNK, SNAPSHOT
from kvstore.blobs.packer import Packer
from kvstore.codecs.base import Codec
from kvstore.errors import Unusable
from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.record import R, RecordKind, codecs_of
from kvstore.ledger.stack import TierStack
from kvstore.ledger.writing import Committer
from kvstore.session import SessionRef
from kvstore.stats import Counters, Repacking
from kvstore.tiers.base import Blob
from kvstore.workers import lower_priority

LOOK_S: Final = 0.25  # while the machine is busy, how often to check whether it still is
# Refused blobs, and sessions that came from another engine, are looked at again after this time.
AGAIN_S: Final = 600.0

OnPacked = Callable[[SessionRef], None]

_log = logging.getLogger(__name__)


def packed_again(packer: Packer, blob: Blob, key: bytes, codec: Codec) -> Blob | None:
    """Pack an unpacked blob; None if it has been through a lossy codec, now or before.

    Of a state only the parts that its engine marked are packed; older releases did not write marks.

    Raises:
        Unusable: the blob is damaged, not the requested one, or in an unknown codec.
    """
    verified = blobs.verify(blob, key)
    first, num_tokens = verified.header.first_token, verified.header.num_tokens
    if packer.is_lossy(verified):
        return None
    packer.check_length(verified)
    run = packer.layout.empty(num_tokens)
    if key[:1] != SNAPSHOT:
        packer.unpack_run(verified, key, first, num_tokens, run)
        packed = packer.pack_run(key, run, first, codec)
    elif packer.has_lossy_state(verified):
        return None
    else:
        state = packer.unpack_snapshot(verified, key, first, num_tokens, run)
        how = packer.codecs.sessions.get(codec.id)
        packed = packer.pack_snapshot(key, state, run, first, num_tokens, codec=codec, how=how)
    return packed if len(packed) < len(blob) else None


@dataclass(frozen=True)
class _Resting:
    """A blob with copies that may be unpacked: by level, the codec under whose tag each is."""

    key: bytes
    copies: Mapping[int, str]


class Repacker(Generic[R]):
    """Owns a thread of the lowest priority once it has begun. Thread-safe."""

    def __init__(
        self,
        kind: RecordKind[R],
        stack: TierStack,
        index: SessionIndex[R],
        committer: Committer[R],
        claims: Claims,
        packer: Packer,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._stack = stack
        self._index = index
        self._committer = committer
        self._claims = claims
        self._packer = packer
        self._counters = counters
        self._clock = clock
        self._is_idle: Callable[[], bool] = bool
        self._on_packed: OnPacked | None = None
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

    def begin(self, is_idle: Callable[[], bool], on_packed: OnPacked | None = None) -> None:
        """Pack from now on, whenever ``is_idle`` reports that the machine is free. Call once.

        Args:
            is_idle: called before each blob, on a thread of this object.
            on_packed: called there for each session that takes less space than before.
        """
        self._is_idle, self._on_packed = is_idle, on_packed
        self._woken.set()
        self._thread = threading.Thread(target=self._run, name="kvstore-repack", daemon=True)
        self._thread.start()

    def look_again(self) -> None:
        """Begin another pass, since tiers may have other codecs now."""
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

    # ---- which sessions

    def _pack_all(self) -> None:
        settled = self._settled  # replaced by a new set when other codecs are adopted
        self._left = self._wanted(settled) if self._targets() else {}
        for key in list(self._left):
            if not self._may_go_on():
                return
            if self._pack_session(key):
                settled.add(key)
            self._left.pop(key, None)

    def _wanted(self, settled: set[bytes]) -> dict[bytes, int]:
        """Find the sessions with unpacked blobs: bytes by record key.

        The oldest and largest come first: by bytes times seconds unused.
        """
        now_s, found = self._clock(), dict[bytes, tuple[float, int]]()
        for record in self._index.usable():
            key = self._index.key(record)
            if key in settled:
                continue
            if not self._may_go_on():
                return {}
            if any(self._resting(record)):
                weight = max(now_s - record.last_used_s, 1.0) * record.packed_bytes
                found[key] = weight, record.packed_bytes
            else:
                settled.add(key)
        return {key: found[key][1] for key in sorted(found, key=lambda x: -found[x][0])}

    def _targets(self) -> dict[int, Codec]:
        """Return the codecs of tiers that lose precision of rows or states, by level."""
        codecs = self._packer.codecs
        own = {i: codecs.of(name) for i, name in enumerate(self._stack.names)}
        return {i: x for i, x in own.items() if not x.exact or x.id in codecs.sessions}

    def _resting(self, record: R) -> Iterator[_Resting]:
        """List the blobs of a session of which some tier may have an unpacked copy.

        States come first: they are the largest.
        """
        keys = sorted(self._index.owned(record), key=lambda x: x[:1] != SNAPSHOT)
        found: dict[bytes, dict[int, str]] = {}
        for level, codec in self._targets().items():
            for tag, some in self._places(record, keys, codec):
                held = self._stack.hold_in(level, tag, some)
                for key in (x for x, yes in zip(some, held, strict=True) if yes):
                    found.setdefault(key, {})[level] = tag
        return (_Resting(key, copies) for key, copies in found.items())

    def _places(
        self, record: R, keys: Sequence[bytes], codec: Codec
    ) -> Iterator[tuple[str, Sequence[bytes]]]:
        """Yield the codecs under whose tags unpacked copies may be, and of which blobs."""
        for exact_id in self._packer.exact_ids:
            if exact_id != codec.id:
                yield exact_id, keys
        if codec.exact:  # it packs states
            yield codec.id, [x for x in keys if x[:1] == SNAPSHOT]
        elif record.tail_bytes is None:  # rows of older releases are under the tier's own tag
            yield codec.id, [x for x in keys if x[:1] != CHUNK]

    # ---- one session

    def _pack_session(self, key: bytes) -> bool:
        """Pack a session's unpacked blobs; False if the session is to be looked at again."""
        record = self._index.get(key)
        if record is None:
            return True
        if self._goes_on_elsewhere(record) or not self._names_codecs(key):
            return False
        is_whole, freed = True, 0
        for resting in list(self._resting(record)):
            if not self._may_go_on():
                return False
            with self._claims.claim(key):
                now = self._index.get(key)
                if now is not None and resting.key in self._index.owned(now):
                    saved = self._pack_blob(resting, record.tenant)
                    is_whole = is_whole and saved is not None
                    freed += saved or 0
        self._freed_bytes += freed
        if self._take_sizes(key) or freed:
            self._num_done += 1
            if self._on_packed is not None:
                self._on_packed(SessionRef(record.tenant, record.id, b""))
        return is_whole

    def _goes_on_elsewhere(self, record: R) -> bool:
        """True if another engine wrote a newer record of the session, which must be kept."""
        there = self._index.find_shared(record.tenant, record.id)
        if there is None or there.last_used_s <= record.last_used_s:
            return False
        return self._kind.blob_keys(there) != self._kind.blob_keys(record)

    def _names_codecs(self, key: bytes) -> bool:
        """Ensure that the session's record names the codecs that its blobs will be in."""
        with self._claims.claim(key):
            record = self._index.get(key)
            if record is None:
                return False
            codecs = codecs_of(self._packer.readable, record.codecs)
            if set(codecs) <= set(record.codecs):
                return True
            return self._committer.replace(msgspec.structs.replace(record, codecs=codecs))

    def _pack_blob(self, resting: _Resting, tenant: str) -> int | None:
        """Exchange a blob's unpacked copies; return the bytes freed, None if a tier refused one."""
        forms: dict[str, Blob] = {}
        targets, freed, is_refused = self._targets(), 0, False
        for level, tag in resting.copies.items():
            codec = targets.get(level)
            blob = self._stack.find_in(level, tag, resting.key) if codec is not None else None
            if codec is None or blob is None:
                continue
            packed = forms.get(codec.id) or self._packed(blob, resting.key, codec)
            if packed is None:
                continue
            forms[codec.id] = packed
            if self._stack.exchange(level, tag, resting.key, packed, tenant):
                self._counters.add("repacked_blobs")
                freed += len(blob) - len(packed)
            else:
                is_refused = True
        return None if is_refused else freed

    def _packed(self, blob: Blob, key: bytes, codec: Codec) -> Blob | None:
        try:
            return packed_again(self._packer, blob, key, codec)
        except Unusable:  # a restore finds that, too, and removes the copy
            return None

    def _take_sizes(self, key: bytes) -> bool:
        """Write the present sizes of the blobs into the session's record; False if unchanged."""
        record = self._index.get(key)
        sizes = None if record is None else self._sizes(record)
        if sizes is None:
            return False
        with self._claims.claim(key):
            now = self._index.get(key)
            if now is None or self._index.blob_keys(now) != list(sizes):
                return False
            resized = _resized(now, sizes)
            return resized != now and self._committer.replace(resized)

    def _sizes(self, record: R) -> dict[bytes, int] | None:
        """Get the sizes of all blobs, of each in the fastest tier that has it.

        None if one is gone.
        """
        keys = self._index.blob_keys(record)
        levels = dict(zip(keys, self._stack.locate(keys).levels, strict=True))
        sizes: dict[bytes, int | None] = {}
        for level in range(len(self._stack)):
            own = [key for key in keys if levels[key] == level]
            if own:
                sizes.update(zip(own, self._stack.lengths(level, own), strict=True))
        known = {key: size for key in keys if (size := sizes.get(key)) is not None}
        return known if len(known) == len(levels) else None


def _resized(record: R, sizes: Mapping[bytes, int]) -> R:
    """The record with the present sizes of its blobs, given by key."""
    states = sum(n for key, n in sizes.items() if key[:1] == SNAPSHOT)
    chunks = sum(n for key, n in sizes.items() if key[:1] == CHUNK)
    run_bytes = sum(sizes.values()) - states
    return record.resized(run_bytes, run_bytes - chunks, states)
