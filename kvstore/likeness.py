"""Compares this store's data with the data on its Redis: secret, fingerprint, chunk size, seed.

    thermocline:check:MODEL    four keyed hashes of 8 bytes, one for each of ``KINDS``

The first engine of a model writes the value, and engines with the same value renew it. Any other
engine learns which of the four hashes differ, and nothing else. MODEL is a hash of the model's name
without a secret, so that engines with different secrets find the same key.

A separate thread reads the value at the start and then every ``LOOK_S`` seconds. No request waits
for it. A value that is lost or forged only changes the reasons of misses and a line in the log.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.session import MissReason
from kvstore.tiers.seal import read_secret
from kvstore.workers import Periodic

KINDS: Final = ("secret", "fingerprint", "chunks", "seed")
LOOK_S: Final = 60.0
KEPT_S: Final = 86_400  # a value that no engine renews is gone after this time
_HASH_BYTES: Final = 8
VALUE_BYTES: Final = _HASH_BYTES * len(KINDS)

WORDS: Final[dict[str, str]] = {
    "secret": (
        "the data on this Redis was sealed with another secret (store.secret_file), or"
        " store.encrypt differs: neither server finds what the other stored. Copy the secret file"
        " of the first server to all others, or give this one a Redis database of its own"
    ),
    "fingerprint": (
        "the data on this Redis is of a model of this name with another fingerprint (weights,"
        " dtype, the engine's version, or vLLM's --block-size), so it cannot be restored here;"
        " install and set the same on all servers"
    ),
    "chunks": (
        "the data on this Redis is in chunks of another size, so it is not found here; give"
        " vLLM the same --block-size on all servers"
    ),
    "seed": (
        "the engine that wrote to this Redis has another PYTHONHASHSEED, so vLLM gives other names"
        " to the same blocks; set it alike on all servers, or nowhere"
    ),
}
# Runs commands and returns their replies in order; raises ``TierUnavailable``.
RunCommands = Callable[[Sequence[tuple[Any, ...]]], list[Any]]
_log = logging.getLogger(__name__)


class StoredAs(msgspec.Struct, frozen=True, kw_only=True):
    """The facts in which two engines must agree to find each other's data."""

    model: str  # as clients call it
    part: str = ""  # which part of the model, if several processes have one part each
    fingerprint: str
    chunk_tokens: int
    encrypt: bool
    hash_seed: str = ""  # PYTHONHASHSEED, where the engine's own names of blocks depend on it

    @property
    def key(self) -> bytes:
        """The key in Redis under which the model's value is stored."""
        digest = blake2b(f"{self.model}\0{self.part}".encode(), digest_size=16)
        return b"thermocline:check:" + digest.hexdigest().encode()

    def value(self, secret: bytes) -> bytes:
        """Return the keyed hashes of the facts; only a holder of the secret can compare them."""
        facts = ("", self.fingerprint, str(self.chunk_tokens), self.hash_seed)
        purpose = b"thermocline check" + (b" sealed" if self.encrypt else b" signed")
        key = hmac.digest(secret, purpose, "sha256")
        return b"".join(
            hmac.digest(key, f"{kind}\0{fact}".encode(), "sha256")[:_HASH_BYTES]
            for kind, fact in zip(KINDS, facts, strict=True)
        )


def differences(own: bytes, there: bytes) -> tuple[str, ...]:
    """Return which of ``KINDS`` differ between two values of ``VALUE_BYTES`` bytes.

    Only "secret" if that differs, since another secret changes all four hashes.
    """
    hashes = range(0, VALUE_BYTES, _HASH_BYTES)
    found = [
        kind
        for kind, i in zip(KINDS, hashes, strict=True)
        if own[i : i + _HASH_BYTES] != there[i : i + _HASH_BYTES]
    ]
    return ("secret",) if "secret" in found else tuple(found)


def there(run: RunCommands, key: bytes) -> bytes | None:
    """Read the value of a model from Redis; None if no engine wrote one.

    Raises:
        TierUnavailable: Redis did not answer.
    """
    (reply,) = run([("GETRANGE", key, 0, VALUE_BYTES)])
    if isinstance(reply, Exception):
        raise TierUnavailable(f"redis: {reply}")
    return bytes(reply) if reply else None


class Likeness:
    """The known differences between this store and the data on its Redis; none without a Redis.

    Attributes:
        differs: some of ``KINDS``; replaced as a whole.
    """

    def __init__(self) -> None:
        self.differs: tuple[str, ...] = ()

    def why_unknown(self) -> MissReason:
        """Return why a session that is not known here may be missing."""
        if "secret" in self.differs:
            return "foreign-secret"
        return "fingerprint" if {"fingerprint", "chunks"} & set(self.differs) else "never-stored"

    def why_diverged(self) -> MissReason:
        """Return why a session that is known here may have nothing in common with its prompt."""
        return "foreign-seed" if "seed" in self.differs else "diverged"

    def close(self) -> None:
        """End looking."""


class RedisLikeness(Likeness):
    """Compares this store with the value on a Redis at intervals.

    Args:
        run: see ``RunCommands``; called on a separate thread.
        close: closes the connection of ``run``.
        look_s: seconds between comparisons.
    """

    def __init__(
        self,
        run: RunCommands,
        stored: StoredAs,
        secret: bytes,
        close: Callable[[], None] = lambda: None,
        look_s: float = LOOK_S,
    ) -> None:
        super().__init__()
        self._run = run
        self._key, self._value = stored.key, stored.value(secret)
        self._close = close
        self._thread = Periodic(self._look, look_s, "kvstore-likeness", at_once=True)

    def close(self) -> None:
        self._thread.close()
        self._close()

    def _look(self) -> None:
        try:
            found = there(self._run, self._key)
            if found is None:
                self._run([("SET", self._key, self._value, "EX", KEPT_S, "NX")])
            elif found == self._value:
                self._run([("EXPIRE", self._key, KEPT_S)])
        except TierUnavailable:
            return  # the link has counted and logged it
        differs = differences(self._value, self._value if found is None else found)
        for kind in set(differs) - set(self.differs):
            _log.warning("%s", WORDS[kind])
        if self.differs and not differs:
            _log.info("nothing on this Redis differs from this server's data any more")
        self.differs = differs


def likeness_of(config: StoreConfig, stored: StoredAs) -> Likeness:
    """Return the ``Likeness`` of a store, which compares it with its Redis if it has one.

    Raises:
        ValueError: ``redis_url`` is not a URL of a Redis server, or the secret cannot be read.
    """
    if not (config.redis_url and config.secret_file):
        return Likeness()
    from kvstore.tiers.redis_server.link import RedisLink

    link = RedisLink(config.redis_url, config.redis_deadline_s)
    return RedisLikeness(link.run, stored, read_secret(Path(config.secret_file)), link.close)
