"""Sessions with KV that can be checked: every row is a function of all tokens up to it.

So a restored run either equals the prompt's own prefill, bit for bit, or it is wrong, and
``check`` says so. Shared by the tests of the cold store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvstore.blobs.codec_set import CodecSet
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.session import SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVPair, StoredModel
from kvstore.store.store import Store
from kvstore.store.token_store import ColdStore, Match, Restored, Snapshot, StateArray, StateTree
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier

CHUNK = 16
LAYOUT = KVLayout("bfloat16", (KVLayer(2, 16, 16), KVLayer(1, 32, 16)))
MIB = 1 << 20


def ref(session_id: str = "s", tenant: str = "t", salt: bytes = b"pepper") -> SessionRef:
    return SessionRef(tenant, session_id, salt)


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


def kv_of(token_ids: Sequence[int], layout: KVLayout = LAYOUT) -> list[KVPair]:
    """(heads, num_tokens, dim) bit patterns mixed from the whole prefix of each token."""
    prefix = np.empty(len(token_ids), np.uint64)
    state = 0
    for i, token in enumerate(token_ids):
        state = (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 64)
        prefix[i] = state
    run = layout.empty(len(token_ids))
    for number, array in enumerate(x for pair in run for x in pair):
        heads, _, dim = array.shape
        salt = np.arange(heads * dim, dtype=np.uint64).reshape(heads, 1, dim) * 2 + 1
        mixed = (prefix[None, :, None] ^ np.uint64(number << 32)) * (salt * 0x9E3779B97F4A7C15)
        # Bounded exponents: finite numbers in each dtype.
        bits = (mixed >> np.uint64(40)).astype(np.uint32)
        array[...] = _as_dtype(bits, layout)
    return run


def _as_dtype(bits: np.ndarray, layout: KVLayout) -> np.ndarray:
    if layout.dtype == "bfloat16":
        return (bits & 0x807F | 0x3F00).astype(np.uint16)
    return ((bits & 0xFFFF).astype(np.float32) / 32768 - 1).astype(layout.numpy_dtype)


def state_at(token_ids: Sequence[int], position: int) -> StateTree:
    """Stands for a recurrent state: something only these very tokens lead to."""
    digest = np.array([hash(tuple(token_ids[:position])) % (1 << 31)], np.int64)
    window = np.asarray(token_ids[max(0, position - 8) : position], np.float32)
    return [{"state": StateArray("int64", digest)}, (StateArray("float32", window), position)]


def snapshot(token_ids: Sequence[int], position: int) -> Snapshot:
    return Snapshot(position, state_at(token_ids, position))


def trees_equal(a: StateTree, b: StateTree) -> bool:
    """Same structure, types and bits."""
    if isinstance(a, StateArray) and isinstance(b, StateArray):
        same = a.dtype == b.dtype and a.array.shape == b.array.shape
        return same and a.array.tobytes() == b.array.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(trees_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(trees_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    return a == b


def open_store(
    tiers: Sequence[Tier],
    *,
    codec: str = "raw",
    codecs: CodecSet | None = None,
    layout: KVLayout = LAYOUT,
    fingerprint: str = "f1",
    needs_state: bool = False,
    clock: Any = time.time,
    **config: Any,
) -> ColdStore:
    settings = StoreConfig(codec=codec, chunk_tokens=CHUNK, num_threads=2, **config)
    model = StoredModel("model", fingerprint, layout, needs_state)
    return ColdStore(settings, model, codecs or codec_by_name(codec), tiers, clock=clock)


S = TypeVar("S", bound=Store[Any])


@contextmanager
def opener(open: Callable[..., S]) -> Iterator[Callable[..., S]]:
    """Open stores that are closed at the end."""
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(closing(open(*args, **more)))


class RenamedRam(RamTier):
    """A second tier that needs no folder."""

    name = "disk"


def everything(tier: Tier) -> dict[bytes, bytes]:
    return {key: bytes(blob) for key, blob in tier.scan(b"")}


def ram(nbytes: int = 64 * MIB) -> RamTier:
    return RamTier(nbytes)


def disk(folder: Path, nbytes: int = 64 * MIB) -> DiskTier:
    return DiskTier(folder / "cold", nbytes)


def save(
    store: ColdStore, session: SessionRef, token_ids: Sequence[int], positions: Sequence[int] = ()
) -> None:
    """Save and wait until every tier has it."""
    run = kv_of(token_ids, store.layout)
    snapshots = [snapshot(token_ids, x) for x in positions]
    assert store.save(session, token_ids, run, snapshots)
    assert store.flush(20)


def come_back(
    store: ColdStore, session: SessionRef | None, prompt: Sequence[int], **more: Any
) -> tuple[Match, Restored]:
    """Match and load a prompt, and check every restored bit against the prompt's own KV."""
    salt = session.salt if session else ref().salt
    match = store.match(session, salt, prompt, more.pop("limit", len(prompt)), **more)
    restored = store.load(match)
    check(store, restored, prompt)
    assert restored.num_tokens <= match.num_tokens
    return match, restored


def check(store: ColdStore, restored: Restored, prompt: Sequence[int]) -> None:
    expected = kv_of(prompt[: restored.num_tokens], store.layout)
    for (k, v), (want_k, want_v) in zip(restored.run, expected, strict=True):
        assert k.flags.c_contiguous and v.flags.c_contiguous
        assert k.tobytes() == want_k.tobytes() and v.tobytes() == want_v.tobytes()
    if restored.state is not None:
        assert trees_equal(restored.state, state_at(prompt, restored.num_tokens))
