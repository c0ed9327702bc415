"""The facts that an engine publishes of itself to others that have the same secret."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec


def release() -> str:
    """Return the version of this program; "" where it is not installed as a package."""
    try:
        return version("thermocline")
    except PackageNotFoundError:
        return ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Names what must be the same where two engines are to find each other's blobs.

    Later releases may say more; what is not known here is passed over.
    """

    model: str  # as clients call it
    part: str = ""  # of the model, where several processes have one each
    fingerprint: str
    codec: str = ""  # id of the one that is used for Redis
    chunk_tokens: int = 0
    encrypt: bool = False
    hash_seed: str = ""  # of the names that the engine itself gives to blocks: PYTHONHASHSEED
    release: str = msgspec.field(default_factory=release)
