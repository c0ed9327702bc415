"""The most bytes that a tenant may hold in a tier."""

from __future__ import annotations

import msgspec


class TenantLimits(msgspec.Struct, frozen=True):
    """The limits of one tier. A limit counts what a budget counts: names and overhead, too."""

    named: dict[str, int | None] = {}  # bytes by tenant; None = any number
    others: int | None = None  # of each tenant that is not named; None = any number

    def of(self, tenant: str) -> int | None:
        """Return a tenant's limit in bytes; None = any number.

        Blobs whose tenant is not known, those of "", have no limit.
        """
        return self.named.get(tenant, self.others) if tenant else None


NO_LIMITS = TenantLimits()
