"""An engine's membership among those on its Redis, and the differences that keep it apart.

No request waits for it: a separate thread asks the server every ``BEAT_S`` seconds. If the server
does not answer, the last result is forgotten after a lease. The result is only a belief, so losing
it costs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from kvstore.config import StoreConfig
from kvstore.errors import TierUnavailable
from kvstore.roster import ID_BYTES, LEASE_S, Entry, EntrySeal, Facts, Roster
from kvstore.session import MissReason
from kvstore.stats import Difference, Members
from kvstore.tiers.seal import read_secret
from kvstore.workers import Periodic

if TYPE_CHECKING:
    from kvstore.tiers.redis_server.link import RedisLink

# Differences by which one engine's blobs cannot be found by the other, without any record of it.
APART: Final = frozenset({"secret", "encryption"})
SEED: Final = "seed"

_CURE: Final = "see `thermocline join`"
WORDS: Final[dict[str, str]] = {
    "secret": (
        "have another secret, so neither finds what the other stored; give all of them one"
        f" store.secret_file ({_CURE}), or, if they are to be apart, a Redis database of their own"
    ),
    "encryption": "differ in store.encrypt, so neither finds what the other stored; set it alike",
    "forged": (
        "claim to have this server's secret and do not; another program writes to this Redis: give"
        " it a password, or ACL users"
    ),
    "fingerprint": (
        "serve a model of this name with another fingerprint (weights, dtype, or the engine's"
        " version), so its sessions cannot be restored here; install the same on all"
    ),
    "codec": (
        "pack sessions for Redis with another codec or profile than this one, which may not be"
        " readable here; set store.codec alike, and wait until both have measured the model"
    ),
    "seed": (
        "have another PYTHONHASHSEED, so vLLM gives other names to the same blocks; set it alike,"
        " or nowhere"
    ),
    "chunks": "have another store.chunk_tokens, so neither finds what the other stored",
    "release": "run another release of this program; install the same on all",
}
BEAT_S: Final = 15.0
_log = logging.getLogger(__name__)


def _by_value(name: str) -> Callable[[Facts, Facts], bool]:
    return lambda own, other: getattr(own, name) != getattr(other, name)


_OF_ALL: Final = {"encryption": _by_value("encrypt"), "release": _by_value("release")}
_OF_ONE_MODEL: Final = {
    "fingerprint": _by_value("fingerprint"),
    "codec": _by_value("codec"),
    SEED: _by_value("hash_seed"),
    "chunks": _by_value("chunk_tokens"),
}


def kinds_between(own: Facts, other: Facts) -> Iterator[str]:
    """Yield the kinds of differences between two engines that share a secret."""
    yield from (kind for kind, differs in _OF_ALL.items() if differs(own, other))
    if (own.model, own.part) == (other.model, other.part):
        yield from (kind for kind, differs in _OF_ONE_MODEL.items() if differs(own, other))


def compared(own: Facts, entries: Iterable[Entry]) -> Members:
    """Compare an engine with all others; each of them counts once for each kind."""
    counts: Counter[str] = Counter()
    alike = 0
    for entry in {x.id: x for x in entries}.values():
        if entry.forged:
            kinds = ["forged"]
        elif entry.facts is None:
            kinds = ["secret"]
        else:
            kinds = list(kinds_between(own, entry.facts))
        counts.update(kinds)
        alike += not kinds
    return Members(alike, tuple(difference(kind, counts[kind]) for kind in WORDS if counts[kind]))


def among(entries: Iterable[Entry]) -> list[Difference]:
    """Compare engines of one secret and model with each other; the first is the reference."""
    firsts: dict[tuple[str, str], Facts] = {}
    counts: Counter[str] = Counter()
    for facts in (x.facts for x in entries if x.facts is not None):
        first = firsts.setdefault((facts.model, facts.part), facts)
        counts.update(kind for kind, differs in _OF_ONE_MODEL.items() if differs(first, facts))
    return [difference(kind, counts[kind]) for kind in WORDS if counts[kind]]


def difference(kind: str, number: int) -> Difference:
    """Describe in a sentence how this number of engines on the same Redis differs."""
    return Difference(kind, number, f"other engines on this Redis ({number}) {WORDS[kind]}")


class Membership:
    """Implements ``Company`` on a Redis server.

    Args:
        link: owned by this object.
        facts: returns this engine's present facts; called on the thread.
    """

    def __init__(
        self,
        link: RedisLink,
        secret: bytes,
        facts: Callable[[], Facts],
        monotonic: Callable[[], float] = time.monotonic,
        beat_s: float = BEAT_S,
    ) -> None:
        self._link = link
        self._roster = Roster(link, EntrySeal(secret))
        self._facts = facts
        self._monotonic = monotonic
        self._id = secrets.token_bytes(ID_BYTES)
        self._members: Members | None = None  # replaced as a whole
        self._seen_at = 0.0
        self._said: set[str] = set()
        self._thread = Periodic(self._beat, beat_s, "kvstore-members", at_once=True)

    def report(self) -> Members | None:
        if self._monotonic() - self._seen_at > LEASE_S:
            return None
        return self._members

    def why_unknown(self) -> MissReason:
        return "foreign-secret" if self._kinds() & APART else "never-stored"

    def why_diverged(self) -> MissReason:
        return "foreign-seed" if SEED in self._kinds() else "diverged"

    def _kinds(self) -> set[str]:
        members = self.report()
        return {x.kind for x in members.differing} if members else set()

    def close(self) -> None:
        self._thread.close()
        with contextlib.suppress(TierUnavailable):  # the lease ends by itself
            self._roster.leave(self._id)
        self._link.close()

    def _beat(self) -> None:
        facts = self._facts()
        try:
            others = [x for x in self._roster.look() if x.id != self._id]
            self._members, self._seen_at = compared(facts, others), self._monotonic()
            self._say(self._members)
            self._roster.keep(self._id, facts)
        except TierUnavailable:
            return  # the link has counted and logged it

    def _say(self, members: Members) -> None:
        """Log each kind of difference when it appears, and when it is gone."""
        kinds = {x.kind for x in members.differing}
        for each in members.differing:
            if each.kind not in self._said:
                _log.warning("%s", each.text)
        for kind in self._said - kinds:
            _log.info("no engine on this Redis differs in this any more: %s", kind)
        self._said = kinds


class Company(Protocol):
    """Reports to a store about the engines that share its Redis.

    Thread-safe; never waits.
    """

    def report(self) -> Members | None:
        """Report the other engines; None: they are not known."""

    def why_unknown(self) -> MissReason:
        """Return why a session that is not known here may be missing."""

    def why_diverged(self) -> MissReason:
        """Return why a session that is known here may have nothing in common with its prompt."""

    def close(self) -> None: ...


class Alone:
    """Implements ``Company`` for a store without Redis."""

    def report(self) -> Members | None:
        return None

    def why_unknown(self) -> MissReason:
        return "never-stored"

    def why_diverged(self) -> MissReason:
        return "diverged"

    def close(self) -> None:
        pass


ALONE: Final = Alone()


def joined(config: StoreConfig, facts: Callable[[], Facts]) -> Company:
    """Join the engines on the store's Redis, if it has one.

    Args:
        facts: returns this engine's present facts; called on a separate thread.

    Raises:
        ValueError: ``redis_url`` is not a URL of a Redis server, or the secret cannot be read.
    """
    if not config.redis_url:
        return ALONE
    from kvstore.tiers.redis_server.link import RedisLink

    secret = read_secret(Path(config.secret_file)) if config.secret_file else b""
    return Membership(RedisLink(config.redis_url, config.redis_deadline_s), secret, facts)
