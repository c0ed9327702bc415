"""Sessions and tenants as the store knows them: names, limits, chunks, states, reasons of misses.

Chunks have the same size for every codec and both engines, and the size enters every chunk's name.
Every codec packs each token by itself, so small chunks are as dense as large ones (decision 89).

A state (recurrent layers, sliding windows) is as large as thousands of packed tokens, so a session
keeps only two. The newest serves the turn that continues the answer. The one before the answer
serves a chat template that drops the model's reasoning, an answer that is generated again, and a
last message that is edited. A return to an earlier point costs a prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

TierName: TypeAlias = Literal["ram", "disk", "redis"]


class TierKind(NamedTuple):
    """The properties of a tier that follow from its name."""

    place: str  # words for a message: sessions sleep "in memory"
    outlives_engine: bool
    is_shared: bool  # engines on other machines write to it, too
    restore_share: float  # about how long a restore takes, as a share of the prefill it replaces


# The fastest first.
TIERS: Final[Mapping[TierName, TierKind]] = {
    "ram": TierKind("in memory", outlives_engine=False, is_shared=False, restore_share=0.01),
    "disk": TierKind("on disk", outlives_engine=True, is_shared=False, restore_share=0.02),
    "redis": TierKind("in Redis", outlives_engine=True, is_shared=True, restore_share=0.05),
}
TIER_NAMES: Final[tuple[TierName, ...]] = tuple(TIERS)
# Why tokens that may have been computed before have to be computed again.
MissReason: TypeAlias = Literal[
    "never-stored",  # nothing of this session was ever saved here
    "too-short",  # the session had fewer tokens than a chunk, and only full chunks are saved
    "diverged",  # the new prompt departs from the stored one
    "evicted",  # a tier ran out of room
    "ttl",
    "fingerprint",  # saved by another model, dtype or layout, or by codecs not known here
    "corrupt",
    "deadline",  # a slow tier; prefill is faster
    "computed-sooner",  # the tokens after a hot beginning are computed sooner than restored
    "unavailable",  # a tier is down
    "disabled",  # this engine serves without hibernation
    # No part of the session was found, and an engine on the same Redis has another secret: the
    # session may be stored there, sealed with that secret.
    "foreign-secret",
    # The session's chunks have other names, because the engine on the same Redis that saved them
    # has another PYTHONHASHSEED.
    "foreign-seed",
]
# The reasons for a session that the store does not know; it may simply be new.
UNKNOWN_REASONS: Final[frozenset[MissReason | None]] = frozenset(
    {"never-stored", "too-short", "foreign-secret"}
)
STATES_PER_SESSION: Final = 2
CHUNK_TOKENS: Final = 32
SessionName: TypeAlias = tuple[str, str]  # tenant and session id


class SessionRef(msgspec.Struct, frozen=True):
    """The name of one session of one tenant. ``salt``: the tenant's; it enters every chunk key."""

    tenant: str
    id: str
    salt: bytes

    @property
    def name(self) -> SessionName:
        return self.tenant, self.id


def chunk_of_blocks(block_tokens: int) -> int:
    """Return the tokens per chunk for an engine whose blocks have ``block_tokens`` tokens.

    A chunk is a whole number of blocks, at least one, and near ``CHUNK_TOKENS``.
    """
    return max(CHUNK_TOKENS // block_tokens, 1) * block_tokens


def kept_states(positions: Iterable[int], most: int) -> tuple[int, ...]:
    """Choose the states to keep: the newest ``most`` positions, ascending."""
    return tuple(sorted(set(positions)))[-most:]


def by_worth(positions: Iterable[int]) -> list[int]:
    """Order positions of states by importance: the newest first."""
    return sorted(set(positions), reverse=True)


class KVSize(msgspec.Struct, frozen=True):
    """The bytes that a session's KV takes, as a function of its number of tokens.

    Sizes of several parts of a model can be added.
    """

    per_token: int = 0  # bytes in the layers that keep every token
    windows: tuple[tuple[int, int], ...] = ()  # (bytes per token, most tokens kept) of each
    fixed: int = 0  # bytes of the recurrent states

    def of(self, num_tokens: int) -> int:
        """Count the bytes of a session of ``num_tokens``."""
        windows = sum(nbytes * min(num_tokens, longest) for nbytes, longest in self.windows)
        return self.per_token * num_tokens + windows + (self.fixed if num_tokens else 0)

    def __add__(self, other: KVSize) -> KVSize:
        return KVSize(
            self.per_token + other.per_token, self.windows + other.windows, self.fixed + other.fixed
        )


class TenantLimits(msgspec.Struct, frozen=True):
    """The bytes of one tier that each tenant may use; names and overhead count, as in a budget."""

    named: dict[str, int | None] = {}  # bytes by tenant; None = any number
    others: int | None = None  # of each tenant that is not named; None = any number

    def of(self, tenant: str) -> int | None:
        """Return a tenant's limit in bytes; None = any number.

        A tenant ``NAME/USER`` (one user of the API key ``NAME``) has a limit of its own, as large
        as that of ``NAME``. Blobs of the tenant "", whose owner is not known, have no limit.
        """
        if not tenant:
            return None
        name = tenant if tenant in self.named else tenant.partition("/")[0]
        return self.named.get(name, self.others)


NO_LIMITS = TenantLimits()
