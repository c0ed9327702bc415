"""Names of sessions and tiers, and the reasons why a part of a session could not be reused."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

import msgspec

TierName: TypeAlias = Literal["ram", "disk", "redis"]
TIER_NAMES: Final[tuple[TierName, ...]] = get_args(TierName)  # fastest first
# Engines on other machines write to these tiers, too.
SHARED_TIERS: Final[frozenset[TierName]] = frozenset({"redis"})
# Why something that was once computed has to be computed again.
MissReason: TypeAlias = Literal[
    "never-stored",  # nothing of this session was ever saved here
    "diverged",  # the new prompt departs from the stored one
    "evicted",  # a tier ran out of room
    "ttl",
    "fingerprint",  # saved by another model, dtype or layout, or by codecs not known here
    "corrupt",
    "deadline",  # a slow tier; prefill is faster
    "unavailable",  # a tier is down
    "disabled",  # this engine serves without hibernation
    # Nothing of it was found, and an engine on the same Redis has another secret: the session may
    # be stored there, sealed with that secret.
    "foreign-secret",
    # All of it is under other names: another engine on the same Redis has another PYTHONHASHSEED.
    "foreign-seed",
]
# The reasons for an unknown session, which may well be new.
UNKNOWN_REASONS: Final[frozenset[MissReason | None]] = frozenset({"never-stored", "foreign-secret"})


class SessionRef(msgspec.Struct, frozen=True):
    """Names one session of one tenant. ``salt`` is the tenant's; it enters every chunk key."""

    tenant: str
    id: str
    salt: bytes
