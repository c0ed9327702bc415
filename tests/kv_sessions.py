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

from benchmarks.stacks.constants import configured
from kvstore.blobs.chain import Piece, as_tokens
from kvstore.blobs.packer import StoreCodecs
from kvstore.blobs.state_tree import StateArray, StateTree, state_nbytes
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.session import SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVPair, KVRun, StoredModel, slice_tokens
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Match, Restored
from kvstore.store.states import StateAt, TakenState, pack_of_states
from kvstore.tiers.base import Blob, Tier
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
    codecs: StoreCodecs | None = None,
    layout: KVLayout = LAYOUT,
    fingerprint: str = "f1",
    needs_state: bool = False,
    windows: KVLayout | None = None,
    window_tokens: int = 0,
    chunk_tokens: int = CHUNK,
    clock: Any = time.time,
    **config: Any,
) -> ColdStore:
    settings = configured(StoreConfig, codec=codec, num_threads=2, **config)
    model = StoredModel("model", fingerprint, layout, needs_state, windows, window_tokens)
    known = codecs or codec_by_name(codec)
    return ColdStore(settings, model, known, tiers, chunk_tokens=chunk_tokens, clock=clock)


class Rows:
    """A source of rows that are there already.

    ``restored_tokens``: so many of the first came from a lossy copy.
    """

    def __init__(
        self,
        store: ColdStore,
        run: KVRun,
        states: Sequence[StateAt] = (),
        restored_tokens: int = 0,
    ) -> None:
        self._store = store
        self._run = run
        model = store.model
        self._states = [TakenState(x, model.windows, model.window_tokens) for x in states]
        self._restored_tokens = restored_tokens
        self.packed: list[Piece] = []
        self.is_released = False

    def is_restored(self, piece: Piece) -> bool:
        if piece.is_state:
            return 0 < piece.first_token <= self._restored_tokens
        return piece.first_token < self._restored_tokens

    def pack(self, pieces: Sequence[Piece]) -> list[Blob]:
        self.packed = list(pieces)
        return [self._packed(x) for x in pieces]

    def release(self) -> None:
        self.is_released = True

    def _packed(self, piece: Piece) -> Blob:
        if not piece.is_chunk:
            return pack_of_states(self._states, piece, self._store.packer)
        rows = slice_tokens(self._run, piece.first_token, piece.end_token)
        return self._store.packer.pack_rows(piece, rows)


S = TypeVar("S", bound=ColdStore)


@contextmanager
def opener(open: Callable[..., S]) -> Iterator[Callable[..., S]]:
    """Open stores that are closed at the end."""
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(closing(open(*args, **more)))


class RenamedRam(RamTier):
    """A second tier that needs no folder."""

    name = "disk"


class SharedRam(RamTier):
    """One that engines share, and that outlives them."""

    name = "redis"

    def close(self) -> None:
        pass


def everything(tier: Tier) -> dict[bytes, bytes]:
    return {key: bytes(blob) for key, blob in tier.scan(b"")}


def ram(nbytes: int = 64 * MIB) -> RamTier:
    return RamTier(nbytes)


def disk(folder: Path, nbytes: int = 64 * MIB) -> DiskTier:
    return DiskTier(folder / "cold", nbytes)


def chain_of(store: ColdStore, session: SessionRef | None, token_ids: Sequence[int]) -> list[bytes]:
    salt = session.salt if session else ref().salt
    return store.maker.of_tokens(salt, as_tokens(token_ids))


def save(
    store: ColdStore,
    session: SessionRef,
    token_ids: Sequence[int],
    positions: Sequence[int] = (),
    run: KVRun | None = None,
    restored_tokens: int = 0,
) -> Rows:
    """Save and wait until every tier has it; ``positions``: of states, at ends of chunks."""
    run = kv_of(token_ids, store.model.layout) if run is None else run
    source = Rows(store, run, states_at(token_ids, positions), restored_tokens)
    chain = chain_of(store, session, token_ids)
    assert store.save(session, chain, source, **state_options(store, token_ids, positions))
    assert store.flush(200)
    return source


def states_at(token_ids: Sequence[int], positions: Sequence[int]) -> list[StateAt]:
    return [StateAt(x, state_at(token_ids, x)) for x in positions]


def state_options(
    store: ColdStore, token_ids: Sequence[int], positions: Sequence[int]
) -> dict[str, Any]:
    nbytes = sum(state_nbytes(x.tree) for x in states_at(token_ids, positions))
    return {"states": [x // store.chunk_tokens for x in positions], "state_bytes": nbytes}


def begin_save(
    store: ColdStore,
    session: SessionRef,
    token_ids: Sequence[int],
    restored: Restored | None = None,
    positions: Sequence[int] = (),
    **options: Any,
) -> bool:
    """Save without waiting, as an engine that went on from what was restored."""
    run = kv_of(token_ids, store.model.layout)
    for pair, before in zip(run, restored.run, strict=True) if restored else ():
        for array, rows in zip(pair, before, strict=True):
            array[:, : rows.shape[1]] = rows
    states = states_at(token_ids, positions)
    source = Rows(store, run, states, restored.lossy_tokens if restored else 0)
    options |= state_options(store, token_ids, positions)
    return store.save(session, chain_of(store, session, token_ids), source, **options)


def come_back(
    store: ColdStore, session: SessionRef | None, prompt: Sequence[int], limit: int | None = None
) -> tuple[Match, Restored]:
    """Match and restore a prompt, and check every restored bit against the prompt's own KV."""
    match = store.match(session, chain_of(store, session, prompt[:limit]))
    restored = store.restore(match)
    check(store, restored, prompt)
    assert restored.num_tokens <= match.num_tokens
    return match, restored


def check(store: ColdStore, restored: Restored, prompt: Sequence[int]) -> None:
    expected = kv_of(prompt[: restored.num_tokens], store.model.layout)
    for (k, v), (want_k, want_v) in zip(restored.run, expected, strict=True):
        assert k.flags.c_contiguous and v.flags.c_contiguous
        assert k.tobytes() == want_k.tobytes() and v.tobytes() == want_v.tobytes()
    if restored.state is not None:
        assert trees_equal(restored.state, state_at(prompt, restored.num_tokens))
