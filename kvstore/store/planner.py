"""Plans how much of a prompt can be restored, and from which tiers.

A prompt and a session are chains of names. Each full chunk of the prompt is looked up by its name,
whether this session stored it, an abandoned branch of it, or another session of the tenant with the
same beginning. The plan is the longest run of chunks without a hole. The session's own record
explains why the run ends where it does.

A model whose cache cannot be cut back can be restored only where a state was taken.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvstore.blobs.chain import WINDOW, Chain, ChainKeys, Piece, num_common
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.record import SessionRecord
from kvstore.session import MissReason, SessionRef

PROBE_CHUNKS: Final = 64  # the least chunks of the first look-up; each later one has twice as many


class BlobRead(NamedTuple):
    """A blob to read, from the fastest tier that has it.

    ``level``: of that tier in the stack. ``skip``: how many first tokens of the blob are not used.
    """

    piece: Piece
    level: int
    skip: int = 0

    @property
    def key(self) -> bytes:
        return self.piece.key


class Plan(NamedTuple):
    """The part of a prompt that can be restored.

    Args:
        reads: the blobs to read: a state and its windows first, then chunks without a hole.
        num_chunks: chunks of the prompt that are then in place, from its first one on.
        reason: why no more of the session can be restored; None if nothing is lost.
        record: the session's record; None if there is no usable one.
    """

    reads: list[BlobRead]
    num_chunks: int
    reason: MissReason | None
    record: SessionRecord | None


class _KnownSession(NamedTuple):
    """The session's usable record, if there is one, compared with a prompt."""

    record: SessionRecord | None
    common: int = 0  # leading chunks that record and prompt share
    why_not: MissReason = "never-stored"  # why there is no usable record


class _FoundRun(NamedTuple):
    reads: list[BlobRead]
    num_chunks: int  # of the prompt, up to the end of the run
    down: bool  # a tier did not answer


class Planner:
    """Finds the blobs for a prompt. Thread-safe; reads records, but no other blobs.

    Args:
        needs_state: whether only a prefix that ends at a stored state can be used.
    """

    def __init__(self, ledger: Ledger, keys: ChainKeys, *, needs_state: bool) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._stack = ledger.stack
        self._keys = keys
        self._needs_state = needs_state

    def plan(self, session: SessionRef | None, chain: Chain, first: int = 0) -> Plan:
        """Plan the longest run of a prompt's chunks from number ``first`` on."""
        known = _KnownSession(None) if session is None else self._known(session, chain)
        if self._needs_state:
            states = known.record.states if known.record else ()
            wanted = max((x for x in states if x <= known.common), default=0)
            found = self._to_state(chain, first)
        else:
            wanted = known.common
            found = self._rows(chain, first, len(chain), known.common - first)
        reason = self._reason(known, found, wanted, len(chain))
        return Plan(found.reads, found.num_chunks, reason, known.record)

    # ---- the session's own record

    def _known(self, session: SessionRef, chain: Chain) -> _KnownSession:
        """Return this store's record, or another engine's if that matches more of the prompt.

        A record in a shared tier that is older than this store's does not count. This store wrote
        it, and the newer one is still being written there.
        """
        local = self._usable(session, self._index.find(session), chain)
        if not self._stack.shared:
            return local
        elsewhere = self._index.find_shared(self._index.key_of(session))
        shared = self._usable(session, elsewhere, chain)
        if shared.record is None or (
            local.record is not None
            and (
                shared.common <= local.common
                or shared.record.last_used_s < local.record.last_used_s
            )
        ):
            return local
        self._ledger.committer.take(shared.record)
        return shared

    def _usable(
        self, session: SessionRef, record: SessionRecord | None, chain: Chain
    ) -> _KnownSession:
        if record is None:
            return _KnownSession(None, 0, self._ledger.why_unknown(session))
        if not self._ledger.records.is_usable(record):
            return _KnownSession(None, 0, "fingerprint")
        if self._index.is_over(record):
            return _KnownSession(None, 0, "ttl")
        return _KnownSession(record, num_common(record.names, chain))

    # ---- rows

    def _rows(self, chain: Chain, first: int, end: int, expected: int) -> _FoundRun:
        """Find the longest run of chunks from ``first`` to at most ``end``.

        Args:
            expected: how many are likely to be held; so many are looked up at first.
        """
        if not self._keys.growing:
            return _FoundRun([], end, False)
        reads: list[BlobRead] = []
        down, at, step = False, first, max(expected, PROBE_CHUNKS)
        while at < end:
            pieces = self._keys.chunks(chain, at, min(at + step, end))
            located = self._stack.locate([x.key for x in pieces])
            count, down = located.num_leading, down or located.down
            pairs = zip(pieces[:count], located.levels, strict=False)
            reads += [BlobRead(x, level) for x, level in pairs if level is not None]
            at += count
            if count < len(pieces):
                break
            step *= 2
        return _FoundRun(reads, at, down)

    # ---- states

    def _to_state(self, chain: Chain, first: int) -> _FoundRun:
        """Find the furthest state that is held with its windows and all chunks before it."""
        numbers = range(len(chain), first, -1)
        located = self._stack.locate([self._keys.state(chain, x).key for x in numbers])
        down = located.down
        for number, level in zip(numbers, located.levels, strict=True):
            if level is None:
                continue
            windows = self._windows(chain, number)
            if windows is None:
                continue
            rows = self._rows(chain, first, number, number - first)
            down = down or rows.down
            if rows.num_chunks == number:
                state = BlobRead(self._keys.state(chain, number), level)
                return _FoundRun([state, *windows, *rows.reads], number, down)
        return _FoundRun([], first, down)

    def _windows(self, chain: Chain, num_chunks: int) -> list[BlobRead] | None:
        """Find the window rows of a state; None if some are gone."""
        pieces = self._keys.windows(chain, num_chunks)
        if not pieces:
            return []
        start, size = pieces[0].first_token, self._keys.chunk_tokens
        skip = start % size
        # The window may begin inside a chunk whose window rows are all held for an earlier state.
        number = start // size
        whole = Piece(WINDOW + chain[number], number * size, size)
        levels = self._stack.locate([x.key for x in (whole, *pieces)]).levels
        if skip and levels[0] is not None:
            pieces, levels = [whole, *pieces[1:]], [levels[0], *levels[2:]]
        else:
            levels, skip = levels[1:], 0
        found = [BlobRead(x, i) for x, i in zip(pieces, levels, strict=True) if i is not None]
        if len(found) < len(pieces):
            return None
        return [found[0]._replace(skip=skip), *found[1:]]

    # ---- why not more

    def _reason(
        self, known: _KnownSession, found: _FoundRun, wanted: int, end: int
    ) -> MissReason | None:
        """Return why the run ends before the prompt does; None if nothing of the session is lost.

        Args:
            wanted: the number of first chunks that the record promises.
            end: the number of chunks of the prompt.
        """
        record = known.record
        if found.num_chunks >= end and (found.reads or not end or not self._needs_state):
            return None
        if record is None:
            return "unavailable" if found.down and not found.reads else known.why_not
        if found.num_chunks < wanted:
            return "unavailable" if found.down else "evicted"
        if known.common >= min(record.num_chunks, end):
            return "evicted" if self._needs_state and not found.reads else None
        return "diverged" if known.common else self._ledger.likeness.why_diverged()
