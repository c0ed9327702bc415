"""Opens cold stores with few verbs, for the tests of what a store promises.

A *history* is a list of token ids. A chunk has sixteen: what is after the last full chunk is never
stored, so of a hundred tokens 96 come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from kvstore.session import MissReason, SessionRef, TierName
from kvstore.store.cold_store import ColdStore
from kvstore.tiers.base import Tier
from kvstore.tiers.ram_tier import RamTier
from tests import kv_sessions
from tests.faulty_tier import FaultyTier
from tests.kv_sessions import CHUNK, ref
from tests.kv_sessions import everything as blobs_of
from tests.kv_sessions import tokens as history

PATIENCE_S = 120.0  # no test goes on with an unfinished save


@dataclass(frozen=True)
class Back:
    """What a returning prompt found; its rows were checked bit for bit."""

    num_tokens: int
    tier: TierName | None
    reason: MissReason | None


@dataclass(frozen=True)
class Rig:
    opened: ExitStack  # closes the stores at the end of a test

    def open(self, tiers: Sequence[Tier], **more: Any) -> ColdStore:
        return self.opened.enter_context(closing(kv_sessions.open_store(tiers, **more)))

    def save(
        self, store: ColdStore, session: SessionRef, tokens: Sequence[int], *, is_down: bool = False
    ) -> None:
        """Returns once every tier has all that it will take. ``is_down``: one cannot be flushed."""
        source = kv_sessions.Rows(store, kv_sessions.kv_of(tokens, store.model.layout))
        assert store.save(session, kv_sessions.chain_of(store, session, tokens), source)
        assert store.flush(PATIENCE_S) is not is_down

    def back(
        self,
        store: ColdStore,
        session: SessionRef | None,
        prompt: Sequence[int],
        *,
        is_down: bool = False,
    ) -> Back:
        match, restored = kv_sessions.come_back(store, session, prompt)
        assert store.flush(PATIENCE_S) is not is_down
        return Back(restored.num_tokens, restored.tier, restored.reason or match.reason)


Store = ColdStore


@contextmanager
def demoting(store: Store, below: FaultyTier) -> Iterator[None]:
    """While the session ``s`` is demoted, and the tier below has not yet taken its record."""
    below.hanging = "replace"
    below.go_on.clear()
    demotion = threading.Thread(target=store.demote, args=(ref(), "disk"))
    demotion.start()
    assert below.entered.wait(10)
    yield
    below.go_on.set()
    demotion.join(20)


def damage(tier: Tier, chosen: Callable[[bytes], bool]) -> int:
    """Flip a bit in the payload of the chosen blobs; how many there were."""
    names = [name for name in blobs_of(tier) if chosen(name)]
    for name in names:
        bad = bytearray(blobs_of(tier)[name])
        bad[-1] ^= 1
        assert tier.replace(name, bytes(bad))
    return len(names)


MIB = 1 << 20
OURS = ref()
LONG = history(100)  # six chunks, and four tokens that are not stored
WHOLE = 6 * CHUNK
LONGER = [*LONG, *history(20, 1)]  # seven, and eight tokens
FORK = [*LONG[:40], *history(60, 2)]


def resting(store: Store, session_id: str = "s") -> str | None:
    record = store.record(ref(session_id))
    return None if record is None else store.tier_of(record)


def session_bytes(
    rig: Rig,
    open_tier: Callable[[int], Tier] = RamTier,
    session: SessionRef = OURS,
    tokens: Sequence[int] = LONG,
) -> int:
    """What a session takes of a tier that ``open_tier`` makes."""
    tier = open_tier(64 * MIB)
    store = rig.open([tier])
    rig.save(store, session, tokens)
    nbytes = tier.stats().nbytes
    store.forget(session)
    store.close()
    return nbytes


def listed(store: Store) -> set[str]:
    return {x.id for x in store.records()}
