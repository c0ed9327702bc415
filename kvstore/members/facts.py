"""The facts that an engine publishes about itself to others that have the same secret."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec


def release() -> str:
    """Return the version of this program; "" if it is not installed as a package."""
    try:
        return version("thermocline")
    except PackageNotFoundError:
        return ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Names the facts in which two engines must agree to find each other's blobs.

    Later releases may add fields; fields that are unknown here are ignored.
    """

    model: str  # as clients call it
    part: str = ""  # of the model, if several processes have one part each
    fingerprint: str
    codec: str = ""  # id of the codec that is used for Redis
    chunk_tokens: int = 0
    encrypt: bool = False
    hash_seed: str = ""  # PYTHONHASHSEED, which affects the engine's own names of blocks
    release: str = msgspec.field(default_factory=release)
