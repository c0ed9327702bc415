"""Compares the facts of engines, and describes in words what keeps the engines apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kvstore.members.entry import Entry
from kvstore.members.facts import Facts
from kvstore.stats import Difference, Members

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
