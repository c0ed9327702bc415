"""One engine of a simulated fleet: its live KV, and the ledger of the sessions it has packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from engines.base import SessionRef
from kvstore.blobs.chain import CHUNK, RECORD, TAIL
from kvstore.blobs.packer import Packer
from kvstore.codecs.names import EXACT
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.record import StoredSession
from kvstore.session import TierName
from kvstore.shapes import KVLayer, KVLayout
from kvstore.tiers.base import Blob, Tier
from launch.simulation.conditions import Conditions, ModelSize
from launch.simulation.live_sessions import LiveSessions
from launch.simulation.sized_tier import SizedTier, sized

_encoder = msgspec.msgpack.Encoder()
Source: TypeAlias = Literal["hot", "ram", "disk", "redis", "miss"]
SOURCES: Final[tuple[Source, ...]] = ("hot", "ram", "disk", "redis", "miss")
_LAYOUT: Final = KVLayout("bfloat16", (KVLayer(1, 2, 2),))
PACKER: Final = Packer(codec_by_name(EXACT), _LAYOUT, "simulated")
# The ledger's own, bounded by sessions of real sizes, not by these.
_UNBOUNDED: Final = 1 << 50


class SpanRecord(StoredSession, frozen=True, kw_only=True):
    """A session of so many tokens."""

    stored_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.stored_tokens

    @property
    def nbytes(self) -> int:
        return 64


_decoder = msgspec.msgpack.Decoder(SpanRecord)


class SpanRecords:
    """Names, reads and writes such records: see ``kvstore.ledger.record.RecordKind``."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens

    def key(self, tenant: str, session_id: str) -> bytes:
        return RECORD + session_id.encode()

    def blob_keys(self, record: SpanRecord) -> list[bytes]:
        name, tail = record.id.encode(), record.stored_tokens % self.chunk_tokens
        chunks = [b"%b%b.%d" % (CHUNK, name, i) for i in range(self.num_chunks(record))]
        return [*chunks, b"%b%b.%d" % (TAIL, name, record.stored_tokens)] if tail else chunks

    def num_chunks(self, record: SpanRecord) -> int:
        """Count the full chunks."""
        return record.stored_tokens // self.chunk_tokens

    def is_usable(self, record: SpanRecord) -> bool:
        return True

    def pack(self, record: SpanRecord) -> Blob:
        return _encoder.encode(record)

    def unpack(self, key: bytes, blob: Blob) -> SpanRecord:
        return _decoder.decode(blob)


@dataclass
class Reuse:
    """The find of a returning session: its tokens, and the packed bytes of each tier to read."""

    source: Source
    tokens: int = 0
    nbytes: dict[TierName, int] = field(default_factory=dict)


@dataclass
class Held:
    """A session in live KV."""

    tokens: int
    since_s: float


class SimulatedEngine:
    """Obeys as much of ``engines.base.Engine`` as choosing a replica looks at."""

    def __init__(
        self,
        conditions: Conditions,
        size: ModelSize,
        shared: Tier | None,
        clock: Callable[[], float],
    ) -> None:
        """``shared``: the tier of all engines of this model."""
        self._conditions = conditions
        self._size = size
        self._shared = shared
        self._kind = SpanRecords(conditions.simulated_chunk)
        self._clock = clock
        self.ready = True
        self.prefill_free_at = 0.0
        self.restore_free_at = 0.0
        self._begin()

    def _begin(self) -> None:
        self.welcome = object()  # of this life
        self._hot = LiveSessions(self._size.hot_bytes)
        self._held: dict[bytes, Held] = {}
        budgets: dict[TierName, int] = {"ram": self._size.ram_bytes, "disk": self._size.disk_bytes}
        own = [SizedTier(name, x, self._clock) for name, x in budgets.items() if x]
        self._ledger = Ledger(
            StoreConfig(write_queue_bytes=_UNBOUNDED, index_bytes=_UNBOUNDED),
            self._kind,
            PACKER,
            [*own, *([self._shared] if self._shared is not None else [])],
            clock=self._clock,
            monotonic=self._clock,
        )

    @property
    def trouble(self) -> str:
        return "" if self.ready else "the machine was lost"

    def end(self) -> None:
        """Lose all that only this machine has."""
        self.ready = False

    def start(self) -> None:
        """Come back with nothing."""
        self._begin()
        self.ready = True

    # ---- turns

    def find(self, session: SessionRef) -> Reuse:
        """Say what the session's next turn finds here; what it restores becomes near."""
        key = session.id.encode()
        held = self._held.get(key)
        if held is not None and key not in self._hot:
            del self._held[key]
            held = None
        quiet_s = self._conditions.idle_after_s
        if held is not None and self._clock() - held.since_s < quiet_s:
            return Reuse("hot", held.tokens)
        return self._restored(session)

    def _restored(self, session: SessionRef) -> Reuse:
        ledger = self._ledger
        record = ledger.find_anywhere(session)
        if record is None:
            return Reuse("miss")
        keys = ledger.index.needed_keys(record)
        located = ledger.stack.locate(keys)
        near = keys[: located.num_leading]
        if not near:
            return Reuse("miss")
        levels = [x for x in located.levels[: len(near)] if x is not None]
        nbytes: dict[TierName, int] = {}
        slow: list[tuple[bytes, Blob]] = []
        for level in sorted(set(levels)):
            there = [key for key, at in zip(near, levels, strict=True) if at == level]
            found = zip(there, ledger.stack.find(level, there), strict=True)
            blobs = [(key, blob) for key, blob in found if blob is not None]
            nbytes[ledger.stack.name(level)] = sum(len(blob) for _, blob in blobs)
            slow += blobs if level else []
        ledger.promotion.used(ledger.record_key(session), near, slow)
        whole = len(near) == len(keys)
        tokens = record.num_tokens if whole else len(near) * self._kind.chunk_tokens
        return Reuse(ledger.stack.name(max(levels)), tokens, nbytes)

    def run(self, session: SessionRef) -> None:
        """Take a session into live KV, where it stays while it is answered."""
        self._hot.run(session.id.encode())

    def save(
        self, session: SessionRef, tokens: int, *, is_new: bool = False
    ) -> dict[TierName, int]:
        """End a turn: the session is hot, and packed; returns the bytes that each tier got."""
        key = session.id.encode()
        self._held[key] = Held(tokens, self._clock())
        gone = self._hot.add(key, int(tokens * self._size.live_token_bytes))
        if self._hot.nbytes > self._size.hot_bytes * self._conditions.high_water:
            gone += self._hot.shrink(int(self._size.hot_bytes * self._conditions.low_water))
        for name in gone:
            self._held.pop(name, None)
        return self._commit(session, tokens, is_new)

    def _commit(self, session: SessionRef, tokens: int, is_new: bool) -> dict[TierName, int]:
        ledger, kind = self._ledger, self._kind
        if not len(ledger.stack):
            return {}
        before = None if is_new else ledger.find_anywhere(session)
        record = SpanRecord(
            tenant=session.tenant, id=session.id, last_used_s=self._clock(), stored_tokens=tokens
        )
        keys = kind.blob_keys(record)
        levels = ledger.stack.locate(keys).levels
        lengths = [kind.chunk_tokens] * kind.num_chunks(record)
        lengths += [tokens % kind.chunk_tokens] * (len(keys) - len(lengths))
        fresh = {x: n for x, n, at in zip(keys, lengths, levels, strict=True) if at is None}
        kept = set(keys)
        obsolete = [x for x in kind.blob_keys(before) if x not in kept] if before else []

        per_token = self._size.packed_token_bytes
        sizes = {
            tier: {x: int(n * per_token[tier]) for x, n in fresh.items()}
            for tier in ledger.stack.names
        }
        blobs: dict[TierName, dict[bytes, Blob]] = {
            tier: {x: sized(n) for x, n in made.items()} for tier, made in sizes.items()
        }
        if ledger.committer.commit(record, blobs[ledger.stack.name(0)], obsolete):
            ledger.committer.replicate(record, blobs.__getitem__, obsolete)
        return {tier: sum(made.values()) for tier, made in sizes.items()}

    def drop(self, session: SessionRef) -> None:
        """Let go of the live KV of a session that has moved."""
        key = session.id.encode()
        self._hot.remove(key)
        self._held.pop(key, None)
