"""The bookkeeping of one store: its tiers, its sessions, and all work between turns."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvstore.blobs.packer import Packer
from kvstore.blobs.store_codecs import StoreCodecs
from kvstore.codecs.loops.compilations import COMPILATIONS
from kvstore.config import StoreConfig
from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.notices import Notices
from kvstore.ledger.pins import Pins
from kvstore.ledger.reading import Promotion
from kvstore.ledger.record import Records, SessionRecord
from kvstore.ledger.repacking import Repacker
from kvstore.ledger.stack import TierStack
from kvstore.ledger.upkeep import Upkeep
from kvstore.ledger.writing import Committer, WriteBehind
from kvstore.likeness import Likeness
from kvstore.session import MissReason, SessionRef, TierName
from kvstore.stats import Counters, StoreStats
from kvstore.tenant_bytes import NO_LIMITS, TenantLimits, TenantUse
from kvstore.tiers.base import Tier
from kvstore.workers import Periodic, Workers

LOOK_S: Final = 3.0  # between looks; an evicted session is reported after the second one
HOUSEKEEPING_EVERY: Final = 5  # looks


def _none_waits(record_key: bytes) -> bool:
    return False


class Ledger:
    """Thread-safe. Owns ``tiers`` (fastest first), the threads that write them, and the workers.

    Before ``start`` there are no threads: a commit writes all tiers before it returns, and nothing
    runs periodically. Matching
    prompts, naming blobs and packing them is left to the store.

    Args:
        claims: those of the store's own queue of saves, if it has one.
        is_awaited: returns for a record key whether a save of that session is waiting.
        clock: seconds of the wall clock, for stored times.
        monotonic: seconds that never jump, for deadlines.
    """

    def __init__(
        self,
        config: StoreConfig,
        records: Records,
        packer: Packer,
        tiers: Sequence[Tier],
        *,
        claims: Claims | None = None,
        is_awaited: Callable[[bytes], bool] = _none_waits,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.records = records
        self.likeness = Likeness()  # to the data on the Redis
        self.counters = Counters()
        self.workers = Workers(config.num_threads)
        self.claims = claims or Claims()
        self.clock = clock
        self.monotonic = monotonic
        self._packer = packer
        self._switching = threading.Lock()
        self.stack = TierStack(tiers, self.counters)
        self.index = SessionIndex(
            records,
            self.stack,
            self.counters,
            clock,
            max_bytes=config.index_bytes,
            ttl_s=config.ttl_s,
        )
        self.index.load()
        self._say_whose_blobs(self.index.all())
        self.pins = Pins(self.stack)
        self._slower = [
            WriteBehind(
                self.stack, level, config.write_queue_bytes, self.counters, self.index.unused
            )
            for level in range(1, len(self.stack))
        ]
        self.committer = Committer(self.stack, self._slower, self.index, self.pins)
        for record in self.index.all():
            self.committer.follow_pin(record)
        self.promotion = Promotion(self.stack, self.index, self.claims, self.counters)
        self.notices = Notices(self.stack, self.index.restorable)
        self.upkeep = Upkeep(
            self.stack,
            self.index,
            self.committer,
            self.pins,
            self.claims,
            self.workers,
            self.notices,
            is_awaited,
        )
        self.repacker = Repacker(
            self.stack,
            self.index,
            self.committer,
            self.claims,
            packer,
            self.counters,
            clock,
        )
        self._rounds = itertools.count(1)
        self._housekeeping: Periodic | None = None

    def start(self) -> None:
        """Write slower tiers on their own threads from now on, and start upkeep. Call once."""
        for tier in self._slower:
            tier.start()
        self._housekeeping = Periodic(self._keep_house, LOOK_S, "kvstore-upkeep")

    def _say_whose_blobs(self, records: Sequence[SessionRecord]) -> None:
        """Assign to tenants the blobs that an earlier run left in the tiers."""
        keys: dict[str, list[bytes]] = {}
        for record in records:
            owned = (self.index.key(record), *self.index.owned(record))
            keys.setdefault(record.tenant, []).extend(owned)
        for level in range(len(self.stack)):
            for tenant, its_keys in keys.items():
                self.stack.own_in(level, tenant, its_keys)

    def _keep_house(self) -> None:
        if next(self._rounds) % HOUSEKEEPING_EVERY:
            self.notices.look()
            self.upkeep.deletions.retry()
        else:
            self.upkeep.expire()

    def compare(self, likeness: Likeness) -> None:
        """Take reasons of misses from ``likeness``, which is closed with this ledger."""
        self.likeness = likeness

    # ---- sessions between their turns

    def find_anywhere(self, session: SessionRef) -> SessionRecord | None:
        """Return the session's record from memory or a local tier, else from a shared tier."""
        return self.index.find_anywhere(session.tenant, session.id)

    def find(self, session: SessionRef) -> SessionRecord | None:
        """Likewise: a save must know the pin and the blobs of the record that it replaces."""
        return self.find_anywhere(session)

    def why_unknown(self, session: SessionRef) -> MissReason:
        """Explain why nothing of a session is stored."""
        if self.index.has_lapsed(session.tenant, session.id):
            return "ttl"
        if self.index.was_short(session.tenant, session.id):
            return "too-short"
        return self.likeness.why_unknown()

    def why_diverged(self) -> MissReason:
        """Explain why a prompt has not even its first chunk in common with its session."""
        return self.likeness.why_diverged()

    def record_key(self, session: SessionRef) -> bytes:
        """The key under which the session's record is stored."""
        return self.records.key(session.tenant, session.id)

    def limit_tenants(
        self, limits: Mapping[TierName, TenantLimits]
    ) -> dict[TierName, dict[str, TenantUse]]:
        """Hold tenants to bytes of tiers; return the use of those with a limit, by tier.

        Tiers that do not answer, and a shared one, are left out: what their tenants hold is not
        known.
        """
        found: dict[TierName, dict[str, TenantUse]] = {}
        for i, name in enumerate(self.stack.names):
            uses = self.stack.limit_tenants(i, limits.get(name, NO_LIMITS))
            if uses is not None:
                found[name] = uses
        return found

    # ---- codecs

    def adopt(self, codecs: StoreCodecs, *, keep: bool) -> None:
        """Use these codecs from now on. Does not wait: running saves end with the former ones.

        Exact blobs are packed in idle moments (``repacking``). Raises ``UnknownCodec``, with
        nothing changed.
        """
        with self._switching:
            self._packer.adopt(codecs, keep=keep)
        self.repacker.look_again()

    # ---- the whole store

    def stats(self, save_queue_bytes: int) -> StoreStats:
        """Return the current statistics."""
        return StoreStats(
            counters=self.counters.as_dict() | COMPILATIONS.as_counters(),
            save_queue_bytes=save_queue_bytes,
            write_queue_bytes={self.stack.name(i): x.nbytes for i, x in enumerate(self._slower, 1)},
            num_sessions=len(self.index),
            tiers=self.stack.stats(),
            codec=self._packer.codec.id,
            repacking=self.repacker.progress,
            differs=self.likeness.differs,
        )

    def flush(self, deadline_s: float) -> bool:
        """Wait until every tier has its share of all commits; False if time ran out."""
        give_up_at = self.monotonic() + deadline_s
        quiet = self.workers.quiet(deadline_s)
        self.committer.catch_up(self.claims)
        idle = [x.wait_idle(max(give_up_at - self.monotonic(), 0.0)) for x in self._slower]
        return quiet and all(idle) and self.stack.flush()

    def close(self) -> None:
        """Stop all threads and close the tiers; waiting work is dropped. Call once."""
        self.likeness.close()
        self.repacker.close()
        if self._housekeeping is not None:
            self._housekeeping.close()
        for tier in self._slower:
            tier.close()
        self.workers.close()
        self.stack.close()
