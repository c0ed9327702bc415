"""Chains of blocks for tests: made-up hashes, and KV that differs from row to row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from engines.calibration.gate.served_codecs import ServedCodecs
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.packer import Packer
from kvstore.codecs.base import Codec
from kvstore.codecs.presets import codec_by_name
from kvstore.config import StoreConfig
from kvstore.session import SessionRef
from kvstore.shapes import KVLayer, KVLayout, KVPair
from kvstore.store.block_keys import BlockKeys
from kvstore.store.block_store import BlockStore, Fetched
from kvstore.store.records import Span
from kvstore.tiers.base import Tier
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.ram_tier import RamTier

LAYOUT = KVLayout("float32", (KVLayer(2, 64, 64),) * 2)
BLOCK = 4  # tokens
PER_CHUNK = 4  # blocks
FINGERPRINT = "f" * 64


def hashes(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """As vLLM makes them: over the one before and the block's tokens; the salt in the first."""
    chain = [salt.encode()]
    for i in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain.append(sha256(chain[-1] + repr(tokens[i : i + BLOCK]).encode()).digest())
    return chain[1:]


def rows_of(chain: Sequence[bytes], first: int, count: int) -> list[KVPair]:
    """KV that follows from the hashes, as real KV follows from the tokens."""
    run = LAYOUT.empty(count * BLOCK)
    for j in range(count):
        seed = np.random.default_rng(list(chain[first + j][:8]))
        for k, v in run:
            for side in (k, v):
                side[:, j * BLOCK : (j + 1) * BLOCK] = seed.standard_normal((2, BLOCK, 64))
    return run


def ref(session: str = "s", tenant: str = "t") -> SessionRef:
    return SessionRef(tenant, session, b"")


def open_store(
    tiers: Sequence[Tier] | None = None,
    *,
    codec: str = "raw",
    codecs: CodecSet | None = None,
    fingerprint: str = FINGERPRINT,
    clock: Callable[[], float] = time.time,
    has_state: bool = False,
    windows: KVLayout | None = None,
    **config,
) -> BlockStore:
    settings = StoreConfig(chunk_tokens=BLOCK * PER_CHUNK, num_threads=1, **config)
    keys = BlockKeys(fingerprint, BLOCK, PER_CHUNK)
    packer = Packer(codecs or codec_by_name(codec), LAYOUT, fingerprint, windows)
    tiers = tiers or [RamTier(1 << 26)]
    return BlockStore(settings, packer, keys, tiers, clock=clock, has_state=has_state)


def served(codec: str = "raw", data: Path | None = None, **config) -> ServedCodecs:
    return ServedCodecs(StoreConfig(codec=codec, **config), LAYOUT, FINGERPRINT, data)


def ram_and_disk(folder: Path) -> list[Tier]:
    return [RamTier(1 << 26), DiskTier(folder, 1 << 26)]


def rows_behind(chain: Sequence[bytes], part: Sequence[int]) -> list[KVPair]:
    """KV of the tokens after a chain: each row follows from all tokens up to its own."""
    run = LAYOUT.empty(len(part))
    for j in range(len(part)):
        seed = np.random.default_rng([*chain[-1][:8], *part[: j + 1]])
        for k, v in run:
            for side in (k, v):
                side[:, j] = seed.standard_normal((2, 64))
    return run


def save(
    store: BlockStore, session: SessionRef, chain: Sequence[bytes], part: Sequence[int] = ()
) -> list[Span]:
    """What a worker does at the end of a turn; the spans that were new."""
    missing = store.missing(chain, part=part)
    fresh = {x.key: pack(store, chain, x, part) for x in missing}
    store.commit(session, chain, fresh, part=part)
    return missing


def pack(
    store: BlockStore,
    chain: Sequence[bytes],
    span: Span,
    part: Sequence[int] = (),
    codec: Codec | None = None,
) -> bytes:
    first = span.first_block * BLOCK
    if span.is_part:
        return store.packer.pack_run(span.key, rows_behind(chain, part), first)
    run = rows_of(chain, span.first_block, span.num_blocks)
    if span.is_tail:
        return store.packer.pack_run(span.key, run, first)
    return store.packer.pack_run(span.key, run, first, codec)


def check_rows(store: BlockStore, chain: Sequence[bytes], fetched: Fetched) -> None:
    """Every fetched blob holds exactly the rows of the prompt's own hashes, as far as used."""
    for span, blob in fetched.spans:
        run = LAYOUT.empty(span.num_blocks * BLOCK)
        decode = store.packer.unpack_run if span.is_tail else store.packer.unpack_run
        decode(blob, span.key, span.first_block * BLOCK, span.num_blocks * BLOCK, run)
        used = min(span.end_block, fetched.end_block) - span.first_block
        wanted = rows_of(chain, span.first_block, used)
        for got, want in zip(run, wanted, strict=True):
            for a, b in zip(got, want, strict=True):
                assert np.array_equal(a[:, : used * BLOCK], b)
