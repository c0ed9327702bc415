"""Who a session is, and what the store remembers of it between its turns."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

TierName: TypeAlias = Literal["ram", "disk", "redis"]
# Why something that was once computed has to be computed again.
MissReason: TypeAlias = Literal[
    "never-stored",  # nothing of this session was ever saved here
    "diverged",  # the new prompt leaves the stored one
    "evicted",  # a tier ran out of room
    "ttl",
    "fingerprint",  # saved by another model, dtype, layout or codec
    "corrupt",
    "deadline",  # a slow tier; prefill is faster
    "unavailable",  # a tier is down
    "disabled",  # this engine serves without hibernation
]


class SessionRef(msgspec.Struct, frozen=True):
    """One session of one tenant. ``salt`` is the tenant's; it enters every chunk key."""

    tenant: str
    id: str
    salt: bytes


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A session as the cold store knows it; kept in the tiers beside its chunks."""

    tenant: str
    id: str
    fingerprint: str
    codec: str
    token_ids: bytes  # little-endian int32, the whole chain
    tail_tokens: int  # tokens behind the last full chunk, kept raw
    snapshots: tuple[int, ...]  # token positions of stored recurrent or rotating state
    last_used_s: float  # wall clock, for display and ttl only
    pinned: bool = False
    packed_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4
