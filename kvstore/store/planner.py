"""Plans how much of a prompt can be restored, and from where.

A prompt and a session are chains of names. Each full chunk of the prompt is looked up by its name,
whoever stored it: this session, another one of the tenant with the same beginning, an abandoned
branch. The plan is the longest run of chunks without a hole. The session's own record explains why
the run ends where it does.

A cache that cannot be cut back can be restored only where a state was taken.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvstore.blobs.chain import WINDOW, Chain, ChainKeys, Piece, num_common
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.record import SessionRecord
from kvstore.session import MissReason, SessionRef

PROBE_CHUNKS: Final = 64  # looked up at first; then twice as many each time


class BlobRead(NamedTuple):
    """A blob to read, of which the first ``skip`` tokens are not used.

    ``level``: in the tier stack, of the fastest tier that has it.
    """

    piece: Piece
    level: int
    skip: int = 0

    @property
    def key(self) -> bytes:
        return self.piece.key


class Plan(NamedTuple):
    """The blobs to read without a hole; a state comes first, its windows next.

    Args:
        num_chunks: the prompt's chunks that are then restored, those before the first one included.
        reason: why no more of the session can be restored.
        record: of the session, if it is usable for this prompt.
    """

    reads: list[BlobRead]
    num_chunks: int
    reason: MissReason | None
    record: SessionRecord | None


class _KnownSession(NamedTuple):
    """The session's record, as far as it is usable for a prompt."""

    record: SessionRecord | None
    common: int = 0  # leading chunks that record and prompt share
    why_not: MissReason = "never-stored"  # why there is no usable record


class _FoundRun(NamedTuple):
    reads: list[BlobRead]
    num_chunks: int
    down: bool  # a tier did not answer


class Planner:
    """Thread-safe; asks the tiers which blobs they hold and reads only records.

    Args:
        needs_state: only a prefix that ends at a stored state can be used.
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
        """Find this store's record, or another engine's if that matches more of the prompt.

        An older one in a shared tier is this store's own, as long as the newer one is on its way.
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
        """Find the chunks from ``first`` to at most ``end``; ``expected`` of them are likely."""
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
        """Find the furthest state that is held together with everything before it."""
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
        """Find the windows' rows of a state; None if some are gone."""
        pieces = self._keys.windows(chain, num_chunks)
        if not pieces:
            return []
        begun, size = pieces[0], self._keys.chunk_tokens
        skip = begun.first_token % size
        # The chunk in which the window begins may be held whole, from an earlier state.
        number = begun.first_token // size
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
        """Explain the end of a plan. ``wanted``: the leading chunks that the record promised."""
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
