"""Chains of vLLM's blocks for tests: made-up hashes, and KV that differs from row to row."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from engines.calibration.gate.served_codecs import ServedCodecs
from kvstore.config import StoreConfig
from kvstore.session import SessionRef, chunk_of_blocks
from kvstore.shapes import KVLayer, KVLayout, KVPair
from kvstore.store.cold_store import ColdStore
from kvstore.store.restorer import Fetched
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier
from tests import kv_sessions
from tests.kv_sessions import Rows

LAYOUT = KVLayout("float32", (KVLayer(2, 64, 64),) * 2)
BLOCK = 16  # tokens
CHUNK = chunk_of_blocks(BLOCK)
PER_CHUNK = CHUNK // BLOCK  # blocks
FINGERPRINT = "f" * 64


def hashes(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """As vLLM makes them: over the one before and the block's tokens; the salt in the first."""
    chain = [salt.encode()]
    for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain.append(sha256(chain[-1] + repr(list(tokens[i : i + BLOCK])).encode()).digest())
    return chain[1:]


def tokens_of(num_blocks: int, more: int = 0, first: int = 0) -> list[int]:
    """Ids of so many blocks of tokens, and ``more`` tokens."""
    return list(range(first, first + num_blocks * BLOCK + more))


def rows_of(blocks: Sequence[bytes], first: int, count: int) -> list[KVPair]:
    """KV that follows from the hashes, as real KV follows from the tokens."""
    run = LAYOUT.empty(count * BLOCK)
    for j in range(count):
        seed = np.random.default_rng(list(blocks[first + j][:8]))
        for k, v in run:
            for side in (k, v):
                side[:, j * BLOCK : (j + 1) * BLOCK] = seed.standard_normal((2, BLOCK, 64))
    return run


def ref(session: str = "s", tenant: str = "t") -> SessionRef:
    return SessionRef(tenant, session, b"")


def open_store(tiers: Sequence[Tier] | None = None, **options: Any) -> ColdStore:
    """Open a store for blocks of ``BLOCK`` tokens; see ``kv_sessions.open_store``."""
    options = {"layout": LAYOUT, "fingerprint": FINGERPRINT, "chunk_tokens": CHUNK} | options
    return kv_sessions.open_store(tiers or [RamTier(1 << 26)], **options)


def served(codec: str = "raw", data: Path | None = None, **config: Any) -> ServedCodecs:
    return ServedCodecs(StoreConfig(codec=codec, **config), LAYOUT, FINGERPRINT, data)


def ram_and_disk(folder: Path) -> list[Tier]:
    return [RamTier(1 << 26), DiskTier(folder, 1 << 26)]


def chain_of(store: ColdStore, blocks: Sequence[bytes]) -> list[bytes]:
    """The names of the full chunks of these blocks."""
    return store.maker.of_blocks(blocks, BLOCK)


def save(store: ColdStore, session: SessionRef, blocks: Sequence[bytes], note: bytes = b"") -> Rows:
    """Save a turn and wait until it is saved, as a worker does."""
    rows = Rows(store, rows_of(blocks, 0, len(blocks)))
    assert store.save(session, chain_of(store, blocks), rows, note=note)
    assert store.wait_saved(session, 20)
    return rows


def fetch(
    store: ColdStore, blocks: Sequence[bytes], session: SessionRef | None = None, first: int = 0
) -> Fetched:
    """Fetch the stored chunks of these blocks, from chunk number ``first`` on."""
    return store.fetch(store.match(session, chain_of(store, blocks), first))


def num_blocks_in(fetched: Fetched) -> int:
    return fetched.num_chunks * PER_CHUNK


def check_rows(store: ColdStore, blocks: Sequence[bytes], fetched: Fetched) -> None:
    """Every fetched blob holds exactly the rows of the prompt's own hashes."""
    for read, blob in fetched.blobs:
        run = LAYOUT.empty(read.piece.num_tokens)
        store.packer.unpack_rows(blob, read.piece, run)
        wanted = rows_of(blocks, read.piece.first_token // BLOCK, PER_CHUNK)
        for got, want in zip(run, wanted, strict=True):
            for a, b in zip(got, want, strict=True):
                assert np.array_equal(a, b)
