"""Plans how much of a prompt can be restored, and from where.

Stored KV is found in two ways. The session's own record is compared with the prompt, so a chunk
from which the prompt departs half-way, and the tail, are usable too. And every full chunk of the
prompt can be looked up by content: another session of the tenant, or an abandoned branch of this
one, may have stored it. The plan is the longest run of blobs without a hole.

A cache that cannot be cut back can be restored only where a state was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvstore.blobs.packer import Packer
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.record import R, StoredSession
from kvstore.session import MissReason, SessionRef
from kvstore.store.records import Span

PROBE_CHUNKS = 16  # looked up by content at first; then twice as many each time


C = TypeVar("C", bound=StoredSession, contravariant=True)


class Prompt(Protocol[C]):
    """The tokens of a prompt that may be restored, as one kind of store sees them."""

    @property
    def num_tokens(self) -> int: ...

    def common(self, record: C) -> int | None:
        """Count the leading tokens that a session has, too; None: of another model or tenant."""

    def rows(self, record: C) -> list[Span]:
        """Name the blobs of a session's rows that can be compared with a prompt."""

    def chunks(self, first_token: int, end_token: int) -> list[Span]:
        """Name the full chunks of these tokens of the prompt; the first is the first of a chunk."""

    def tails(self, first_token: int, end_token: int) -> list[Span]:
        """Name the tails that any session may have stored of these tokens, the longest first."""

    def states(self, own: Sequence[int], first_token: int) -> list[Span]:
        """Name the states after ``first_token`` that may exist, the newest first.

        Args:
            own: positions of those of the session's record that the prompt has in common with it.
        """


class BlobRead(NamedTuple):
    """A span to read, of which the first ``take`` tokens are used."""

    span: Span
    take: int
    level: int  # in the tier stack, of the fastest tier that has it

    @property
    def key(self) -> bytes:
        return self.span.key

    @property
    def end_token(self) -> int:
        """The index after the last token that is used."""
        return self.span.first_token + self.take


class Plan(NamedTuple, Generic[R]):
    """The blobs to read without a hole; the last is the state, if the model needs one."""

    reads: list[BlobRead]
    end_token: int
    reason: MissReason | None  # why no more of the session can be restored
    record: R | None  # of the session, if it is usable for this prompt
    common: int  # leading tokens that record and prompt share


class _Known(NamedTuple, Generic[R]):
    """The session's record, as far as it is usable for a prompt."""

    prompt: Prompt[R]
    record: R | None
    common: int = 0  # leading tokens that record and prompt share
    why_not: MissReason = "never-stored"  # why there is no usable record


class _Found(NamedTuple):
    reads: list[BlobRead]
    end_token: int
    down: bool  # a tier did not answer


class Planner(Generic[R]):
    """Thread-safe; asks the tiers which blobs they hold and reads only records.

    Args:
        growing: the model has layers that grow with the tokens.
        needs_state: only a prefix that ends at a stored state can be used.
    """

    def __init__(
        self,
        ledger: Ledger[R],
        packer: Packer,
        chunk_tokens: int,
        *,
        growing: bool,
        needs_state: bool,
    ) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._stack = ledger.stack
        self._packer = packer
        self._chunk = chunk_tokens
        self._growing = growing
        self._needs_state = needs_state

    def plan(self, session: SessionRef | None, prompt: Prompt[R], first_token: int = 0) -> Plan[R]:
        """Plan the longest run of blobs from the one that holds ``first_token`` on."""
        known = _Known(prompt, None) if session is None else self._known(session, prompt)
        if self._needs_state:
            positions = known.record.state_positions if known.record else ()
            own = [x for x in positions if x <= known.common]
            found, wanted = self._to_state(known, own, first_token), max(own, default=0)
        else:
            found = self._rows(known, first_token, prompt.num_tokens)
            wanted = known.common
        reason = self._reason(known, found, wanted)
        return Plan(found.reads, found.end_token, reason, known.record, known.common)

    # ---- the session's own record

    def _known(self, session: SessionRef, prompt: Prompt[R]) -> _Known[R]:
        """Find this store's record, or another engine's if that matches more of the prompt.

        An older one in a shared tier is this store's own, as long as the newer one is on its way.
        """
        local = self._usable(session, self._index.find(session.tenant, session.id), prompt)
        if not self._stack.shared:
            return local
        elsewhere = self._index.find_shared(session.tenant, session.id)
        shared = self._usable(session, elsewhere, prompt)
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

    def _usable(self, session: SessionRef, record: R | None, prompt: Prompt[R]) -> _Known[R]:
        if record is None:
            lapsed = self._index.has_lapsed(session.tenant, session.id)
            return _Known(prompt, None, 0, "ttl" if lapsed else self._ledger.likeness.why_unknown())
        common = prompt.common(record)
        if common is None or not self._packer.reads_any(record.codecs):
            return _Known(prompt, None, 0, "fingerprint")
        if self._index.is_over(record):
            return _Known(prompt, None, 0, "ttl")
        return _Known(prompt, record, common)

    # ---- rows

    def _rows(self, known: _Known[R], first: int, end: int) -> _Found:
        """Find the rows of the tokens from ``first`` to at most ``end``."""
        prompt, common = known.prompt, min(known.common, end)
        rows = prompt.rows(known.record) if known.record and common > first else []
        rows = [x for x in rows if x.first_token < common and x.end_token > first]
        own, down = self._held(rows, common)
        reach = own[-1].end_token if own else first
        # After the record's match, later chunks of the prompt may be found by content.
        full = reach - reach % self._chunk
        found, also_down = self._probe(prompt, full, end)
        tails = prompt.tails(found[-1].end_token if found else full, end)
        levels = self._stack.locate([x.key for x in tails]).levels
        tail = [(x, i) for x, i in zip(tails, levels, strict=True) if i is not None][:1]
        found += [BlobRead(x, x.num_tokens, level) for x, level in tail]
        if found and found[-1].end_token > reach:
            own = [x for x in own if x.span.first_token < full] + found
        return _Found(own, own[-1].end_token if own else first, down or also_down)

    def _probe(self, prompt: Prompt[R], first: int, end: int) -> tuple[list[BlobRead], bool]:
        """Find chunks by content from token ``first`` on, up to the first missing one."""
        found: list[BlobRead] = []
        num_tokens = PROBE_CHUNKS * self._chunk
        while chunks := prompt.chunks(first, min(first + num_tokens, end)):
            held, down = self._held(chunks, end)
            found += held
            if len(held) < len(chunks):
                return found, down
            first, num_tokens = first + num_tokens, 2 * num_tokens
        return found, False

    def _held(self, spans: Sequence[Span], end: int) -> tuple[list[BlobRead], bool]:
        """Read the leading spans that are held, up to ``end``; True: a tier did not answer."""
        located, held = self._stack.locate([x.key for x in spans]), list[BlobRead]()
        for x, level in zip(spans, located.levels, strict=True):
            if level is None:
                break
            held.append(BlobRead(x, min(x.num_tokens, end - x.first_token), level))
        return held, located.down

    # ---- states

    def _to_state(self, known: _Known[R], own: Sequence[int], first: int) -> _Found:
        """Find the furthest state that is held together with everything before it."""
        states = known.prompt.states(own, first)
        located = self._stack.locate([x.key for x in states])
        down = located.down
        for state, level in zip(states, located.levels, strict=True):
            if level is None:
                continue
            rows = self._rows(known, first, state.first_token)
            down = down or rows.down
            if not self._growing or rows.end_token == state.first_token:
                read = BlobRead(state, state.end_token - rows.end_token, level)
                return _Found([*rows.reads, read], state.end_token, down)
        return _Found([], first, down)

    # ---- why not more

    def _reason(self, known: _Known[R], found: _Found, wanted: int) -> MissReason | None:
        """Explain the end of a plan. ``wanted``: the leading tokens that the record promised."""
        end, record = known.prompt.num_tokens, known.record
        if found.end_token >= end:
            return None
        if record is None:
            return "unavailable" if found.down and not found.reads else known.why_not
        if found.end_token < wanted:
            if found.down:
                return "unavailable"
            return "evicted" if self._packer.reads_all(record.codecs) else "fingerprint"
        if known.common >= min(record.comparable_tokens, end):
            return "evicted" if self._needs_state and not found.reads else None
        return "diverged" if known.common else self._ledger.likeness.why_diverged()
