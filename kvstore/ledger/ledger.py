"""The bookkeeping of one store: its tiers, its sessions, and all work between turns."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.blobs.packer import Packer
from kvstore.blobs.store_codecs import StoreCodecs
from kvstore.codecs.loops.compilations import COMPILATIONS
from kvstore.config import StoreConfig
from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.notices import Notices
from kvstore.ledger.profiles import Profiles
from kvstore.ledger.reading import CopyReader, Promotion
from kvstore.ledger.record import Records, SessionRecord
from kvstore.ledger.repacking import Repacker
from kvstore.ledger.stack import TierStack
from kvstore.ledger.upkeep import Upkeep
from kvstore.ledger.writing import Committer, Pins, WriteBehind
from kvstore.likeness import Likeness
from kvstore.session import MissReason, SessionRef
from kvstore.stats import Counters, StoreStats
from kvstore.tiers.base import Tier
from kvstore.workers import Periodic, Workers

LOOK_S: Final = 3.0  # between looks; an evicted session is reported after the second one
HOUSEKEEPING_EVERY: Final = 5  # looks


class Ledger:
    """Thread-safe. Owns ``tiers`` (fastest first), the threads that write them, and the workers.

    Matching prompts, naming blobs and packing them is left to the store.

    Args:
        claims: those of the store's own queue of saves.
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
        claims: Claims,
        is_awaited: Callable[[bytes], bool],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self.records = records
        self.likeness = Likeness()  # to the data on the Redis
        self.counters = Counters()
        self.workers = Workers(config.num_threads)
        self.claims = claims
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
        copies = CopyReader(self.stack, self.counters)
        fingerprint = packer.fingerprint
        self.profiles = Profiles(self.stack, copies, fingerprint, self._read_too, monotonic)
        self.profiles.keep(packer.codecs)
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
        for tier in self._slower:
            tier.start()
        self._housekeeping = Periodic(self._keep_house, LOOK_S, "kvstore-upkeep")
        self.workers.later(self.profiles.renew)

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
            self.profiles.renew()

    def compare(self, likeness: Likeness) -> None:
        """Take reasons of misses from ``likeness``, which is closed with this ledger."""
        self.likeness = likeness

    # ---- sessions between their turns

    def why_unknown(self, session: SessionRef) -> MissReason:
        """Explain why nothing of a session is stored."""
        return self.index.why_gone(session) or self.likeness.why_unknown()

    # ---- codecs

    def adopt(self, codecs: StoreCodecs, *, keep: bool) -> None:
        """Use these codecs from now on. Does not wait: running saves end with the former ones.

        Exact blobs are packed in idle moments (``repacking``). Raises ``UnknownCodec``, with
        nothing changed.
        """
        with self._switching:
            self._packer.adopt(codecs, keep=keep)
        self.repacker.look_again()
        self.profiles.keep(codecs)
        self.workers.later(self.profiles.renew)

    def _read_too(self, others: Sequence[StoreCodecs]) -> None:
        with self._switching:
            self._packer.read_too(others)

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
        self.profiles.close()
        self._housekeeping.close()
        for tier in self._slower:
            tier.close()
        self.workers.close()
        self.stack.close()
