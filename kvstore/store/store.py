"""The part of a store that is the same whether its sessions are tokens or blocks.

A cold session is only a cache. A save may be skipped, a tier may lose a blob or be down, a blob may
be damaged: each costs a recompute of the tokens concerned and nothing else. Everything that a
restore returns was verified blob by blob against the tokens it was computed from, the tenant's
salt, the model and the codec.

The ledger (``kvstore.ledger``) keeps track of which sessions exist and where they are stored, and
decides which are evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final, Generic

from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.packer import Packer
from kvstore.ledger.ledger import Ledger
from kvstore.ledger.notices import OnNotice
from kvstore.ledger.record import R
from kvstore.ledger.repacking import OnPacked
from kvstore.session import SessionRef, TierName
from kvstore.stats import Counters
from kvstore.tenant_bytes import TenantLimits, TenantUse
from kvstore.workers import Workers

CLOSE_FLUSH_S: Final = 10.0


class Store(ABC, Generic[R]):
    """Sessions between their turns. Thread-safe. Owns the tiers of its ledger and closes them."""

    def __init__(self, ledger: Ledger[R], packer: Packer) -> None:
        self.ledger = ledger
        self.packer = packer
        self._closed = False
        ledger.start()

    @property
    def workers(self) -> Workers:
        """The store's threads, for callers that pack and unpack its blobs."""
        return self.ledger.workers

    @property
    def counters(self) -> Counters:
        """Counters of this store, as ``stats`` reports them."""
        return self.ledger.counters

    # ---- sessions

    @abstractmethod
    def record(self, session: SessionRef) -> R | None:
        """The record of the session, here or in a shared tier."""

    def records(self, wait_s: float = 0.0) -> list[R]:
        """All known sessions of this model, in codecs known here, that a tier still has.

        After a start the sessions that only Redis has are not known yet: waits while they are
        looked for, at most ``wait_s`` seconds.
        """
        self.ledger.wait_until_known(wait_s)
        return [] if self._closed else self.ledger.upkeep.resting_here()

    def tier_of(self, session: SessionRef | R) -> TierName | None:
        """Return the slowest tier that a restore must read; None if even the beginning is gone."""
        record = self.record(session) if isinstance(session, SessionRef) else session
        return None if record is None or self._closed else self.ledger.upkeep.tier_of(record)

    def demote(self, session: SessionRef, tier: TierName) -> TierName | None:
        """Bring the session to ``tier`` and drop faster copies. Blocks; returns its tier then.

        A pinned session, and one that ``tier`` cannot take as a whole, stays where it is.
        """
        return None if self._closed else self.ledger.upkeep.demote(session, tier)

    def pin(self, session: SessionRef, pinned: bool) -> None:
        """Evict the session's blobs last, or stop that. Blocks while a save of it runs.

        Has no effect on a session that was never saved.
        """
        if not self._closed:
            self.ledger.upkeep.pin(session, pinned)

    def forget(self, session: SessionRef) -> bool:
        """Remove the session from every tier; False if it was not known. Blocks.

        Afterwards no tier holds any of it except blobs that another session here uses. A tier that
        is down deletes it when it is back.
        """
        return not self._closed and self.ledger.upkeep.forget(session)

    def expire(self) -> None:
        """Forget sessions that were not used for ``ttl_s``; also runs periodically by itself."""
        self.ledger.upkeep.expire()

    def listen(self, on_notice: OnNotice) -> None:
        """Call ``on_notice`` on a store thread when sessions expire, are evicted or are found.

        See ``kvstore.ledger.notices``. The call comes within a minute.
        """
        self.ledger.notices.listen(on_notice)

    def limit_tenants(
        self, limits: Mapping[TierName, TenantLimits]
    ) -> dict[TierName, dict[str, TenantUse]]:
        """Hold tenants to bytes of tiers from now on; return what they hold there. Blocks.

        A tier that is not named has no limits. See ``Ledger.limit_tenants``.
        """
        return {} if self._closed else self.ledger.limit_tenants(limits)

    # ---- codecs

    @property
    def codecs(self) -> CodecSet:
        """The codecs that the store uses now."""
        return self.packer.codecs

    def adopt(self, codecs: CodecSet, *, keep: bool = True) -> None:
        """Use these codecs from now on. Any thread; does not wait.

        Blobs stored unpacked are packed later: see ``pack_when``. ``keep``: codecs that could be
        read before still can be; otherwise their blobs are effectively lost. Warm new codecs first.
        Raises ``UnknownCodec``, with nothing changed: one of them cannot take this layout.
        """
        self.ledger.adopt(codecs, keep=keep)

    def pack_when(self, is_idle: Callable[[], bool], on_packed: OnPacked | None = None) -> None:
        """Pack unpacked blobs from now on when ``is_idle``: see ``Repacker.begin``. Call once."""
        self.ledger.repacker.begin(is_idle, on_packed)

    # ---- the store itself

    def flush(self, deadline_s: float) -> bool:
        """Wait until every tier has its share of all saves; False if time ran out."""
        return self.ledger.flush(deadline_s)

    def close(self) -> None:
        """Flush for a bounded time, stop all threads, close the tiers. Safe to call twice."""
        if self._closed:
            return
        self.flush(CLOSE_FLUSH_S)
        self._closed = True
        self._end_saves()
        self.ledger.close()

    def _end_saves(self) -> None:
        """End the threads that save, if the store has any."""
