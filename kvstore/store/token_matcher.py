"""Plans how much of a prompt can be restored, and from where.

Stored KV is found in two ways. The session's own record is compared with the prompt token by token,
so a chunk from which the prompt departs half-way, and the tail, are usable too. And every full
chunk of the prompt can be looked up by content: another session of the tenant, or an abandoned
branch of this one, may have stored it. The plan is the longest run of blobs without a hole.

A cache that cannot be cut back can be restored only where a snapshot was taken. A snapshot carries
the tokens after the last full chunk before it, so it can be at any position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.blobs.chain import Chain, Tokens, as_tokens, common_prefix, no_tokens
from kvstore.blobs.packer import Packer
from kvstore.ledger.ledger import Ledger
from kvstore.session import UNKNOWN_REASONS, MissReason, SessionRef, TierName
from kvstore.store.records import SessionRecord
from kvstore.store.spans import Span
from kvstore.store.token_keys import TokenKeys

PROBE_CHUNKS = 16  # looked up by content at a time


class BlobRead(NamedTuple):
    """A span to read, of which the first ``take`` tokens are used."""

    span: Span
    take: int
    level: int = 0  # in the tier stack, of the fastest tier that has it

    @property
    def key(self) -> bytes:
        return self.span.key


@dataclass(frozen=True)
class Match:
    """The part of a prompt that can be restored. Cheap to make: only records were read, no blobs.

    ``tier`` is the slowest that must be read, None for a miss. ``reason``: why the rest of the KV
    that was once stored is not reusable; None if nothing was lost. ``tokens``, (num_tokens,) int32,
    are the tokens of the match: loading it needs no other source for the tokens of the KV.
    """

    num_tokens: int
    tier: TierName | None
    reason: MissReason | None
    reads: tuple[BlobRead, ...] = field(default=(), repr=False)
    record_key: bytes | None = field(default=None, repr=False)
    tokens: Tokens = field(default_factory=no_tokens, repr=False, compare=False)


@dataclass(frozen=True)
class _Known:
    """The session's record, as far as it is usable for this prompt."""

    record: SessionRecord | None
    common: int  # leading tokens that record and prompt share, at most the limit
    why_not: MissReason | None  # why there is no usable record


class Matcher:
    """Thread-safe; asks the tiers which blobs they hold and reads only records."""

    def __init__(self, ledger: Ledger[SessionRecord], keys: TokenKeys, packer: Packer) -> None:
        self._index = ledger.index
        self._take = ledger.committer.take
        self._stack = ledger.stack
        self._keys = keys
        self._packer = packer
        self._ledger = ledger
        self._chunk = keys.space.chunk_tokens

    def match(
        self,
        session: SessionRef | None,
        salt: bytes,
        token_ids: Sequence[int] | Tokens,
        limit: int,
        boundaries: Sequence[int] = (),
    ) -> Match:
        prompt = as_tokens(token_ids)[: max(limit, 0)]
        root = self._keys.space.root(salt)
        known = self._known(session, root, prompt)
        if self._keys.needs_state:
            plan = self._plan_by_snapshot(known, root, prompt, boundaries)
        else:
            plan = self._plan_by_tokens(known, root, prompt)
        num_tokens = sum(x.take for x in plan.reads)
        key = self._index.key(known.record) if known.record else None
        tier = self._stack.name(max(x.level for x in plan.reads)) if plan.reads else None
        reason = self._reason(known, plan, num_tokens, len(prompt))
        return Match(num_tokens, tier, reason, plan.reads, key, prompt[:num_tokens])

    def usable_record(self, session: SessionRef) -> SessionRecord | None:
        """The session's record, here or in a shared tier, if its blobs can be used here and now.

        The store's own notices name sessions without a salt; such a session is found by name alone.
        """
        tenant, name = session.tenant, session.id
        record = self._index.find(tenant, name) or self._index.find_shared(tenant, name)
        if record is None:
            return None
        if session.salt and record.root != self._keys.space.root(session.salt):
            return None
        over = self._index.is_over(record)
        return record if not over and self._packer.reads_any(record.codecs) else None

    def _reason(self, known: _Known, plan: _Plan, num_tokens: int, limit: int) -> MissReason | None:
        """Return why no more can be restored; see ``Match``."""
        if num_tokens >= limit:
            return None
        record = known.record
        if record is None:
            down = plan.down and not num_tokens
            return "unavailable" if down else _unless(num_tokens, known.why_not)
        if num_tokens < plan.wanted:
            if plan.down:
                return "unavailable"
            return "evicted" if self._packer.reads_all(record.codecs) else "fingerprint"
        return "diverged" if known.common < min(record.num_tokens, limit) else None

    # ---- the session's own record

    def _known(self, session: SessionRef | None, root: bytes, prompt: Tokens) -> _Known:
        if session is None:
            return _Known(None, 0, "never-stored")
        found = self._index.find(session.tenant, session.id)
        local = self._usable(session, found, root, prompt)
        if not self._stack.shared:
            return local
        # Another engine may have continued this session since.
        elsewhere = self._index.find_shared(session.tenant, session.id)
        shared = self._usable(session, elsewhere, root, prompt)
        if elsewhere is None or shared.record is None or shared.common <= local.common:
            return local
        self._take(elsewhere)
        return shared

    def _usable(
        self, session: SessionRef, record: SessionRecord | None, root: bytes, prompt: Tokens
    ) -> _Known:
        if record is None:
            lapsed = self._index.has_lapsed(session.tenant, session.id)
            return _Known(None, 0, "ttl" if lapsed else self._ledger.company.why_unknown())
        if record.root != root or not self._packer.reads_any(record.codecs):
            return _Known(None, 0, "fingerprint")
        if self._index.is_over(record):
            return _Known(None, 0, "ttl")
        return _Known(record, common_prefix(record.tokens, prompt), None)

    # ---- caches that can be cut at any token

    def _plan_by_tokens(self, known: _Known, root: bytes, prompt: Tokens) -> _Plan:
        own = self._own_reads(known)
        located = self._stack.locate([x.key for x in own])
        reads = _held(own, located.levels)
        # After the record's match, later chunks of the prompt may be found by content.
        chain = self._keys.space.chain(root, prompt)
        full = sum(x.take for x in reads) // self._chunk
        found, down = self._probe(chain, full)
        if found:
            reads = reads[:full] + found
        return _Plan(tuple(reads), known.common, located.down or down)

    def _own_reads(self, known: _Known) -> list[BlobRead]:
        """Blobs of the record that cover its common prefix with the prompt; tiers not yet known."""
        if known.record is None or not known.common:
            return []
        record, common = known.record, known.common
        rows = self._keys.rows(self._keys.chain(record), record.tenant, record.id)
        return [
            BlobRead(x, min(x.num_tokens, common - x.first_token))
            for x in rows
            if x.first_token < common
        ]

    def _probe(self, chain: Chain, first: int) -> tuple[list[BlobRead], bool]:
        """Find full chunks of the prompt from chunk ``first`` up to the first missing one."""
        found: list[BlobRead] = []
        chunks = self._keys.chunks(chain)
        for start in range(first, len(chunks), PROBE_CHUNKS):
            reads = [BlobRead(x, x.num_tokens) for x in chunks[start : start + PROBE_CHUNKS]]
            located = self._stack.locate([x.key for x in reads])
            found += _held(reads, located.levels)
            if located.num_leading < len(reads):
                return found, located.down
        return found, False

    # ---- caches that cannot be cut

    def _plan_by_snapshot(
        self, known: _Known, root: bytes, prompt: Tokens, boundaries: Sequence[int]
    ) -> _Plan:
        own = [x for x in (known.record.snapshots if known.record else ()) if x <= known.common]
        # Engines take a state at a boundary, or after the last full chunk before it.
        ends = {y for x in boundaries for y in (x, x - x % self._chunk)}
        probed = [x for x in ends if 0 < x <= len(prompt)]
        positions = sorted({*own, *probed}, reverse=True)
        chain = self._keys.space.chain(root, prompt)
        snapshots = self._stack.locate([chain.snapshot_key(x) for x in positions])
        there = [
            (p, at) for p, at in zip(positions, snapshots.levels, strict=True) if at is not None
        ]
        wanted = max(own, default=0)
        if not there:
            return _Plan((), wanted, snapshots.down)
        names = self._keys.chunks(chain)[: there[0][0] // self._chunk]
        chunks = self._stack.locate([x.key for x in names])
        reads = _held([BlobRead(x, x.num_tokens) for x in names], chunks.levels)
        down = snapshots.down or chunks.down
        for position, level in there:
            before = position // self._chunk if self._keys.growing else 0
            if before <= len(reads):
                take = position - before * self._chunk
                last = BlobRead(self._keys.state(chain, position), take, level)
                return _Plan((*reads[:before], last), wanted, down)
        return _Plan((), wanted, down)


@dataclass(frozen=True)
class _Plan:
    reads: tuple[BlobRead, ...]
    wanted: int  # tokens that the record promised
    down: bool  # a tier did not answer


def _held(reads: list[BlobRead], levels: list[int | None]) -> list[BlobRead]:
    """Return the leading reads that are held, each with the level of its tier."""
    held = []
    for read, level in zip(reads, levels, strict=True):
        if level is None:
            break
        held.append(read._replace(level=level))
    return held


def _unless(num_tokens: int, why_not: MissReason | None) -> MissReason | None:
    """Return no reason for a prompt of no known session that still found something."""
    return None if num_tokens and why_not in UNKNOWN_REASONS else why_not
