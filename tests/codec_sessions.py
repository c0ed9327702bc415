"""Sessions whose rows show how often, and by which codecs, they were packed."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.blobs.chain import CHUNK as CHUNK_KIND
from kvstore.blobs.chain import TAIL
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.format import codec_in
from kvstore.session import SessionRef
from kvstore.shapes import KVPair
from kvstore.store.cold_store import ColdStore, Restored
from kvstore.tiers.base import Tier
from tests.kv_sessions import (
    CHUNK,
    kv_of,
    tokens,
)
from tests.worn_codec import WornCodec, wear_of

HISTORY = tokens(200)  # 12 chunks and a tail of 8
WHOLE = 12 * CHUNK
FAST, DENSE = WornCodec("fast.1", 1), WornCodec("dense.1", 16)
BOTH = CodecSet(FAST, DENSE, DENSE)


def codecs_in(tier: Tier, kind: bytes = CHUNK_KIND) -> list[str]:
    return [codec_in(blob).decode() for key, blob in tier.scan(kind)]


def wake(store: ColdStore, session: SessionRef, prompt: Sequence[int]) -> Restored:
    return store.load(store.match(session, session.salt, prompt, len(prompt)))


def wear(restored: Restored, prompt: Sequence[int]) -> list[set[int]]:
    return wear_of(restored.run, kv_of(prompt[: restored.num_tokens]))


def go_on(restored: Restored, prompt: Sequence[int]) -> list[KVPair]:
    """What an engine has after a restore and a prefill of the rest."""
    run = kv_of(prompt)
    for pair, old in zip(run, restored.run, strict=True):
        for array, rows in zip(pair, old, strict=True):
            array[:, : restored.num_tokens] = rows
    return run


def turn(store: ColdStore, session: SessionRef, prompt: Sequence[int]) -> Restored:
    """Wake, compute the rest, save."""
    restored = wake(store, session, prompt)
    run = go_on(restored, prompt)
    assert store.save(session, prompt, run, lossy_tokens=restored.lossy_tokens)
    assert store.flush(20)
    return restored


def evict(store: ColdStore, place: int) -> None:
    names = [
        name for name, _ in store.ledger.stack.scan(place, b"") if name[:1] in (CHUNK_KIND, TAIL)
    ]
    store.ledger.stack.tiers[place].delete_many(names)
