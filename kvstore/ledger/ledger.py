"""The bookkeeping of one store: its tiers, its sessions, and all work between turns."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic

from kvstore.blobs.chain import RECORD
from kvstore.blobs.codec_set import CodecSet, CodecTags
from kvstore.blobs.packer import Packer
from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.notices import Notices
from kvstore.ledger.pins import Pins
from kvstore.ledger.reading import Promotion
from kvstore.ledger.record import R, RecordKind
from kvstore.ledger.repacking import Repacker
from kvstore.ledger.stack import TierStack
from kvstore.ledger.upkeep import Upkeep
from kvstore.ledger.writing import Committer, WriteBehind
from kvstore.membership import ALONE, Company
from kvstore.session import SessionRef, TierName
from kvstore.stats import Counters, StoreStats
from kvstore.tenant_bytes import NO_LIMITS, TenantLimits, TenantUse
from kvstore.tiers.base import Tier
from kvstore.workers import Periodic, Workers

LOAD_BATCH: Final = 32  # records that are read at once
MOST_LOADS: Final = 20  # rounds in which a tier has records, but none that can be read
FIRST_LOOKS: Final = 2  # after so many a shared tier that does not answer is away
LOOK_S: Final = 3.0  # between looks; an evicted session is reported after the second one
HOUSEKEEPING_EVERY: Final = 5  # looks


_log = logging.getLogger(__name__)


def _none_waits(record_key: bytes) -> bool:
    return False


class Ledger(Generic[R]):
    """Thread-safe. Owns ``tiers`` (fastest first), the threads that write them, and the workers.

    Before ``start`` there are no threads: a commit writes all tiers before it returns, and nothing
    runs periodically. A store passes in records of its own kind and gets them back; matching
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
        kind: RecordKind[R],
        packer: Packer,
        tiers: Sequence[Tier],
        *,
        claims: Claims | None = None,
        is_awaited: Callable[[bytes], bool] = _none_waits,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.company: Company = ALONE  # the other engines on the same Redis
        self.counters = Counters()
        self.workers = Workers(config.num_threads)
        self.claims = claims or Claims()
        self.clock = clock
        self.monotonic = monotonic
        self._packer = packer
        self._switching = threading.Lock()
        self.stack = TierStack(tiers, self.counters)
        self._tag_tiers()
        self.index = SessionIndex(
            kind,
            self.stack,
            self.counters,
            clock,
            max_bytes=config.index_bytes,
            ttl_s=config.ttl_s,
        )
        self.index.load()
        self._say_whose_blobs(self.index.all())
        # Levels with records of earlier lives, and the keys still to be read; None: unknown yet.
        self._to_load: dict[int, list[bytes] | None] = dict.fromkeys(self.stack.shared)
        self._has_looked = threading.Event()
        self.index.is_whole = not self._to_load
        self._vain_loads: Counter[int] = Counter()  # by level
        self._closing = threading.Event()
        self.pins = Pins(self.stack)
        self._slower = [
            WriteBehind(
                self.stack, level, config.write_queue_bytes, self.counters, self.index.unused
            )
            for level in range(1, len(self.stack))
        ]
        self.committer = Committer(kind, self.stack, self._slower, self.index, self.pins)
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
            kind,
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

    def _load_earlier(self) -> None:
        """Take in sessions of earlier lives that only a shared tier has, once it knows them.

        On the thread of upkeep. Deletions that wait for the tier are made up for first.
        """
        if not self._to_load:
            return
        deletions = self.upkeep.deletions
        deletions.retry()
        found: list[R] = []
        awaited = list(self._to_load)
        for level in awaited:
            deletions.retry_records(level)
            if not deletions.is_owed(level):
                found += self._load_from(level)
            if level not in self._to_load:
                deletions.retry_inherited(level)
        self._say_whose_blobs(found)
        for record in found:
            if record.pinned:
                self._follow_pin(self.index.key(record))
        for level in awaited:
            if level not in self._to_load:
                self.stack.pins_known(level)
        if found:
            first = SessionRef(found[0].tenant, found[0].id, b"")
            self.notices.report_found(first, map(self.index.key, found))

    def _load_from(self, level: int) -> list[R]:
        keys = self._to_load[level]
        if keys is None:
            written = self.stack.written(level, RECORD)
            if written is None:
                return []
            keys = written[::-1]  # the most recently used first
        found: list[R] = []
        later: list[bytes] = []
        while keys and not (self._closing.is_set() or self.upkeep.deletions.is_owed(level)):
            batch, keys = keys[:LOAD_BATCH], keys[LOAD_BATCH:]
            try:
                loaded = self.index.load_written(level, batch)
            except TierUnavailable:
                keys = batch + keys
                break
            found += loaded.found
            later += loaded.unread
            if loaded.is_full:
                keys = later = []
                break
        self._vain_loads[level] += bool(later) and not (found or keys)
        if self._vain_loads[level] == MOST_LOADS:
            _log.warning("%s: %d records cannot be read", self.stack.name(level), len(later))
            later = []
        if later or keys:
            self._to_load[level] = later + keys
        else:
            del self._to_load[level]
            self.index.is_whole = not self._to_load
        return found

    def wait_until_known(self, timeout_s: float) -> None:
        """Wait for sessions of earlier lives until the first looks after the start are over."""
        if self._to_load:
            self._has_looked.wait(timeout_s)

    def _follow_pin(self, key: bytes) -> None:
        with self.claims.claim(key):
            record = self.index.get(key)
            if record is not None:  # not forgotten meanwhile
                self.committer.follow_pin(record)

    def _say_whose_blobs(self, records: Sequence[R]) -> None:
        """Assign to tenants the blobs that an earlier run left in the tiers."""
        keys: dict[str, list[bytes]] = {}
        for record in records:
            owned = (self.index.key(record), *self.index.owned(record))
            keys.setdefault(record.tenant, []).extend(owned)
        for level in range(len(self.stack)):
            for tenant, its_keys in keys.items():
                self.stack.own_in(level, tenant, its_keys)

    def _keep_house(self) -> None:
        self._load_earlier()
        number = next(self._rounds)
        if number >= FIRST_LOOKS or not self._to_load:
            self._has_looked.set()
        if number % HOUSEKEEPING_EVERY:
            self.notices.look()
        else:
            self.upkeep.expire()

    def join(self, company: Company) -> None:
        """Set the other engines on the same Redis; ``company`` is closed with this ledger."""
        self.company = company

    # ---- sessions between their turns

    def find_anywhere(self, session: SessionRef) -> R | None:
        """Return the session's record from memory or a local tier, else from a shared tier."""
        return self.index.find_anywhere(session.tenant, session.id)

    def find(self, session: SessionRef) -> R | None:
        """Return the session's record from memory, else from the local tiers.

        A shared tier is asked, too, until its sessions of earlier lives are known: a save must know
        the pin and the blobs of the record that it replaces.
        """
        record = self.index.find(session.tenant, session.id)
        if record is None and self._to_load:
            record = self.index.find_shared(session.tenant, session.id)
        return record

    def record_key(self, session: SessionRef) -> bytes:
        """The key under which the session's record is stored."""
        return self.kind.key(session.tenant, session.id)

    def limit_tenants(
        self, limits: Mapping[TierName, TenantLimits]
    ) -> dict[TierName, dict[str, TenantUse]]:
        """Hold tenants to bytes of tiers; return the use of those with a limit, by tier.

        Tiers that do not answer, and those with sessions of earlier lives that are not known yet,
        are left out: what their tenants hold is not known.
        """
        found: dict[TierName, dict[str, TenantUse]] = {}
        for i, name in enumerate(self.stack.names):
            uses = None
            if i not in self._to_load:
                uses = self.stack.limit_tenants(i, limits.get(name, NO_LIMITS))
            if uses is not None:
                found[name] = uses
        return found

    # ---- codecs

    def adopt(self, codecs: CodecSet, *, keep: bool) -> None:
        """Use these codecs from now on. Does not wait: running saves end with the former ones.

        Stored blobs are found under the tags of all codecs that can be read; unpacked blobs are
        packed in idle moments (``repacking``). Raises ``UnknownCodec``, with nothing changed.
        """
        with self._switching:
            # The header of a blob names its codec, so the order of these steps does not matter.
            self._packer.adopt(codecs, keep=keep)
            self._tag_tiers()
            self.pins.renew()
        self.repacker.look_again()

    def _tag_tiers(self) -> None:
        codecs, readable = self._packer.codecs, self._packer.readable
        self.stack.tag([CodecTags.among(codecs.of(x).id, readable) for x in self.stack.names])

    # ---- the whole store

    def stats(self, save_queue_bytes: int) -> StoreStats:
        """Return the current statistics."""
        codecs = self._packer.codecs
        return StoreStats(
            counters=self.counters.as_dict(),
            save_queue_bytes=save_queue_bytes,
            write_queue_bytes={self.stack.name(i): x.nbytes for i, x in enumerate(self._slower, 1)},
            num_sessions=len(self.index),
            tiers=self.stack.stats(),
            codecs={name: codecs.of(name).id for name in self.stack.names},
            repacking=self.repacker.progress,
            members=self.company.report(),
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
        self._closing.set()
        self._has_looked.set()  # none will be found any more
        self.company.close()
        self.repacker.close()
        if self._housekeeping is not None:
            self._housekeeping.close()
        for tier in self._slower:
            tier.close()
        self.workers.close()
        self.stack.close()
