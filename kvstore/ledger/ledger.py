"""The ledger of one store: it owns the tiers and the index of sessions, and works between turns.

It moves, pins and forgets sessions, and removes those that expired.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

from msgspec.structs import replace

from kvstore.blobs.chain import CHUNK, chunk_before, stretches
from kvstore.blobs.packer import Packer, StoreCodecs
from kvstore.codecs.loops.compiled import COMPILATIONS
from kvstore.config import StoreConfig
from kvstore.ledger.deletions import Deletions
from kvstore.ledger.index import Claims, SessionIndex
from kvstore.ledger.notices import Notices, StoreNotice
from kvstore.ledger.profiles import Profiles
from kvstore.ledger.record import Records, SessionRecord
from kvstore.ledger.repacking import Repacker
from kvstore.ledger.stack import TierStack
from kvstore.ledger.writing import Committer, WriteBehind
from kvstore.likeness import Likeness
from kvstore.session import MissReason, SessionRef, TierName
from kvstore.stats import Counters, StoreStats
from kvstore.tiers.base import Blob, Tier
from kvstore.workers import Periodic, Workers

LOOK_S: Final = 3.0  # between checks; an evicted session is reported after the second one
HOUSEKEEPING_EVERY: Final = 5  # checks; sessions expire and profiles are renewed only then
WAIT_S: Final = 30.0  # the longest wait for running writes of a session


class Ledger:
    """The sessions of one store and where they are stored. Thread-safe.

    Owns ``tiers`` (fastest first), the threads that write to them, and the workers. The store, not
    the ledger, matches prompts, names blobs and packs them. Every method may wait for a commit of
    the session, or for a tier.

    Args:
        claims: claims on sessions, which the store's queue of saves uses too.
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
        # Compares this store with the data on its Redis. The engine replaces this one, which finds
        # no differences. Closed with this ledger.
        self.likeness = Likeness()
        self.counters = Counters()
        self.workers = Workers(config.num_threads)
        self.claims = claims
        self.clock = clock
        self.monotonic = monotonic
        self._is_awaited = is_awaited
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
        self._assign_owners()
        self._slower = [
            WriteBehind(
                self.stack, level, config.write_queue_bytes, self.counters, self.index.unused
            )
            for level in range(1, len(self.stack))
        ]
        self.committer = Committer(self.stack, self._slower, self.index)
        for record in self.index.all():
            self.stack.pin(self.index.key(record), record.pinned)
        fingerprint = packer.fingerprint
        self.profiles = Profiles(self.stack, fingerprint, self._read_too, monotonic)
        self.profiles.keep(packer.codecs)
        self.notices = Notices(self.stack, self.index.restorable)
        self.deletions = Deletions(self.stack, self.index, clock)
        self.repacker = Repacker(
            self.stack,
            self.index,
            self.committer,
            self.claims,
            packer,
            self.counters,
            self.notices.report,
        )
        self._rounds = itertools.count(1)
        self._housekeeping = Periodic(self._keep_house, LOOK_S, "kvstore-upkeep")
        self.workers.later(self.profiles.renew)

    def _assign_owners(self) -> None:
        """Assign the blobs that an earlier process left in the tiers to their tenants.

        The longest unused session comes first, since the first owner of a blob keeps it.
        """
        for record in self.index.all():
            keys = [self.index.key(record), *self.index.owned(record)]
            for level in range(len(self.stack)):
                self.stack.own_in(level, record.tenant, keys)

    def _keep_house(self) -> None:
        if next(self._rounds) % HOUSEKEEPING_EVERY:
            self.notices.look()
            self.deletions.retry()
        else:
            self.expire()
            self.profiles.renew()

    # ---- sessions between their turns

    def why_unknown(self, session: SessionRef) -> MissReason:
        """Explain why nothing of a session is stored."""
        return self.index.why_gone(session) or self.likeness.why_unknown()

    def tier_of(self, record: SessionRecord) -> TierName | None:
        """Return the slowest tier that a restore must read; None if even the beginning is gone.

        Blobs that no other tier has are assumed to be in a shared tier that does not answer.
        """
        local = self.stack.local
        # Every session is asked for in a report. ``num_held`` is quick: it counts the chunks in a
        # tier of this machine without looking each of them up.
        if record.num_chunks and not record.states and self.records.keys.growing:
            num = record.num_chunks
            held = [self.stack.num_held(level, record.name_of, num) for level in local]
            if max(held, default=0) == num or len(local) == len(self.stack):
                most = max(held, default=0)
                return self.stack.name(local[held.index(most)]) if most else None
        located = self.stack.locate(self.records.needed_keys(record))
        levels = [x for x in located.levels[: located.num_leading] if x is not None]
        if located.down and self.stack.shared and len(levels) < len(located.levels):
            levels += self.stack.shared  # it does not answer, and may have the rest
        return self.stack.name(max(levels)) if levels else None

    def resting_here(self) -> list[SessionRecord]:
        """Return the usable sessions whose record a tier still has, or may have."""
        usable = self.index.usable()
        located = self.stack.locate([self.index.key(x) for x in usable])
        held = zip(usable, located.levels, strict=True)
        return [x for x, level in held if level is not None or located.down]

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Move the session to ``tier``: copy it there, then drop its copies in faster tiers.

        A pinned session, and one that ``tier`` cannot take completely, stays where it is.

        Returns:
            The tier of the session afterwards, see ``tier_of``; None if the session is not known.
        """
        level = self.stack.level(tier)
        # Without the claim, a save could meanwhile replace the record that is sent.
        with self.claims.claim(self.index.key_of(session)):
            record = self.index.find_anywhere(session)
            if record is None:
                return None
            sent = None
            if level and not record.pinned:
                sent = self.committer.send(level, record)
        if level and sent is not None and _is_taken(sent):
            self._drop_above(level, record)
        return self.tier_of(record)

    def _drop_above(self, level: int, record: SessionRecord) -> None:
        key, blob_keys = self.index.key(record), self.index.blob_keys(record)
        with self.claims.claim(key):
            now = self.index.get(key)
            if now is None or now.pinned or self.index.blob_keys(now) != blob_keys:
                return  # forgotten, pinned or saved again meanwhile
            own = [key, *self.index.unshared(blob_keys, key)]
            for faster in range(level):
                self.stack.delete(faster, own)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Pin the session, so that its blobs are evicted last, or unpin it.

        Nothing is done if the session was never saved.
        """
        with self.claims.claim(self.index.key_of(session)):
            record = self.index.find_anywhere(session)
            if record is None or record.pinned == pinned:
                return
            self.committer.rewrite(replace(record, pinned=pinned))

    def forget(self, session: SessionRef) -> bool:
        """Delete the session's record and every blob that no other session here uses.

        Returns whether the session was known.
        """
        key = self.index.key_of(session)
        with self.claims.claim(key):
            return self._remove(key)

    def expire(self) -> None:
        """Forget expired sessions, report evicted ones, retry pending deletions."""
        for record in self.index.all():
            if self.index.is_over(record):
                self._let_lapse(self.index.key(record))
        self.notices.look()
        self.deletions.retry()

    def _let_lapse(self, key: bytes) -> None:
        with self.claims.claim(key):
            record = self.index.get(key)
            # The session may have been used since the check, and the save of that turn may wait.
            if record is None or not self.index.is_over(record) or self._is_awaited(key):
                return
            self._remove(key)
            self.index.note(key, "ttl")
        self.notices.report(StoreNotice(SessionRef(record.tenant, record.id, b""), "expired"))

    def _remove(self, key: bytes) -> bool:
        """Delete a session that the caller has claimed; return whether a record was found."""
        self.committer.cancel(key)
        copies = self.index.everywhere(key)
        self.index.remove(key)
        self.workers.quiet(WAIT_S)  # a restore may still be promoting blobs
        self.stack.pin(key, False)
        doomed = sorted({x for copy in copies for x in self.index.owned(copy)})
        # The record is deleted last, so that a caller that was interrupted can begin again. Until
        # then a reader may put it into the index again. Hence ``unshared``, which does not count
        # the session itself, and the second removal.
        last_used_s = max((x.last_used_s for x in copies), default=0.0)
        for keys in (self.index.unshared(doomed, key), [key]):
            self.deletions.everywhere(key, keys, last_used_s)
        self.index.remove(key)
        return bool(copies)

    # ---- after a restore

    def restored(
        self,
        record_key: bytes | None,
        keys: Sequence[bytes],
        slow: Sequence[tuple[bytes, Blob]],
    ) -> None:
        """Put the blobs of a restore into the fastest tier, and mark them as used.

        Args:
            record_key: of the returning session; None if the prompt was of no known session.
            keys: the keys of all blobs that were read, in order.
            slow: the keys and blobs that were read from a slower tier.
        """
        # Before blobs are promoted: a tier's eviction order learns how much of a session it held.
        self._touch(record_key, keys)
        wanted = dict(self._wanted(record_key, slow))
        if not wanted:
            return
        record = None if record_key is None else self.index.get(record_key)
        self._promote(keys, wanted, record)
        # Meanwhile the session may have been saved or forgotten: delete what is unwanted by now.
        gone = wanted.keys() - {key for key, _ in self._wanted(record_key, [*wanted.items()])}
        if record_key is not None and self.index.get(record_key) is None:
            gone.add(record_key)
        self.stack.delete(0, [*gone])

    def _promote(
        self, keys: Sequence[bytes], blobs: Mapping[bytes, Blob], record: SessionRecord | None
    ) -> None:
        """Put blobs into the fastest tier, each after the chunk before it in their chain.

        Args:
            keys: the keys of all blobs that were read.
        """
        chain = keys if record is None else self.index.blob_keys(record)
        if not blobs.keys() <= set(chain):  # chunks of another session, which the prompt matched
            chain = keys
        tenant = record.tenant if record else ""
        for stretch in stretches(chain, blobs):
            items = [(key, blobs[key]) for key in stretch]
            if self.stack.put(0, items, tenant, chunk_before(chain, stretch[0])):
                self.counters.add("promoted_blobs", len(items))
        if record is not None and record.pinned:  # a tier keeps pinned blobs by their record
            blob, end = self.records.pack(record), self.stack.last_held(0, chain)
            self.stack.replace(0, self.index.key(record), blob, tenant, end)

    def _wanted(
        self, record_key: bytes | None, blobs: Sequence[tuple[bytes, Blob]]
    ) -> list[tuple[bytes, Blob]]:
        """Return the blobs that may be promoted.

        Blobs that no session needs or has abandoned are left out, since their session may have
        been forgotten, and so are states that a running save may be about to delete.
        """
        gone = set(self.index.unused(key for key, _ in blobs))
        if record_key is not None:
            record = self.index.get(record_key)
            if record is None:
                return []
            gone -= set(self.index.owned(record))
            if self.claims.is_claimed(record_key):
                gone |= {key for key, _ in blobs if key[:1] != CHUNK}
        return [(key, blob) for key, blob in blobs if key not in gone]

    def _touch(self, record_key: bytes | None, keys: Sequence[bytes]) -> None:
        record = None if record_key is None else self.index.get(record_key)
        if record_key is None or record is None:
            self.stack.touch(keys)
            return
        chain = self.index.blob_keys(record)
        self.stack.touch([record_key, *dict.fromkeys((*keys, *chain))])
        self.index.use(record_key)

    # ---- codecs

    def adopt(self, codecs: StoreCodecs, *, keep: bool) -> None:
        """Use these codecs from now on, without waiting for running saves, which keep the old ones.

        Blobs that were stored exactly are packed in idle moments (``repacking``).

        Args:
            keep: see ``Packer.adopt``.

        Raises:
            UnknownCodec: a codec does not support the layout; nothing is changed.
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
            tiers=[
                replace(x, profile_bytes=self.profiles.nbytes(i))
                for i, x in enumerate(self.stack.stats())
            ],
            codec=self._packer.codec.id,
            repacking=self.repacker.progress,
            differs=self.likeness.differs,
        )

    def flush(self, deadline_s: float) -> bool:
        """Wait until every tier has all commits so far; return False if time ran out."""
        give_up_at = self.monotonic() + deadline_s
        quiet = self.workers.quiet(deadline_s)
        self.committer.catch_up(self.claims)
        idle = [x.wait_idle(max(give_up_at - self.monotonic(), 0.0)) for x in self._slower]
        return quiet and all(idle) and self.stack.flush()

    def close(self) -> None:
        """Stop all threads and close the tiers; queued writes are dropped. Call once."""
        self.likeness.close()
        self.repacker.close()
        self.profiles.close()
        self._housekeeping.close()
        for tier in self._slower:
            tier.close()
        self.workers.close()
        self.stack.close()


def _is_taken(sent: Future[bool]) -> bool:
    """Wait until a tier has all of a session; return False if it failed or took too long."""
    try:
        return sent.result(timeout=WAIT_S)
    except TimeoutError:
        return False
