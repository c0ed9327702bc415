"""The most bytes that a tenant may hold in a tier, and the bytes that it holds and wants there."""

from __future__ import annotations

import msgspec


class TenantLimits(msgspec.Struct, frozen=True):
    """The limits of one tier. A limit counts what a budget counts: names and overhead, too."""

    named: dict[str, int | None] = {}  # bytes by tenant; None = any number
    others: int | None = None  # of each tenant that is not named; None = any number
    # True: the limits in force stay; it is only asked what the tenants with one of these hold.
    counts_only: bool = False

    def of(self, tenant: str) -> int | None:
        """Return a tenant's limit in bytes; None = any number.

        Blobs whose tenant is not known, those of "", have no limit.
        """
        return self.named.get(tenant, self.others) if tenant else None


class TenantUse(msgspec.Struct, frozen=True):
    """The bytes of one tenant in a tier."""

    held: int
    missed: int = 0  # evicted or refused by its limit since the limits were set last


NO_LIMITS = TenantLimits()
