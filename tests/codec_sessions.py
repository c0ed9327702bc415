"""Sessions whose rows show how often, and by which codecs, they were packed."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.format import codec_in
from kvstore.session import SessionRef
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Restored
from kvstore.tiers.base import Tier
from tests.kv_sessions import CHUNK, begin_save, chain_of, kv_of, tokens
from tests.worn_codec import WornCodec, wear_of

HISTORY = tokens(200)  # 12 chunks, and 8 tokens that are not stored
WHOLE = 12 * CHUNK
FAST, DENSE = WornCodec("fast.1", 1), WornCodec("dense.1", 16)


def codecs_in(tier: Tier, kind: bytes = CHUNK_KIND) -> list[str]:
    return sorted(codec_in(blob).decode() for key, blob in tier.scan(kind))


def wake(store: ColdStore, session: SessionRef, prompt: Sequence[int]) -> Restored:
    return store.restore(store.match(session, chain_of(store, session, prompt)))


def wear(restored: Restored, prompt: Sequence[int]) -> list[set[int]]:
    """By token: the changes of its numbers, {0} for an exact one."""
    return wear_of(restored.run, kv_of(prompt[: restored.num_tokens]))


def turn(store: ColdStore, session: SessionRef, prompt: Sequence[int]) -> Restored:
    """Wake, compute the rest, save."""
    restored = wake(store, session, prompt)
    assert begin_save(store, session, prompt, restored)
    assert store.flush(200)
    return restored


def evict(store: ColdStore, level: int, every: int = 1) -> None:
    names = [name for name, _ in store.ledger.stack.scan(level, CHUNK_KIND)]
    store.ledger.stack.tiers[level].delete_many(names[::every])
