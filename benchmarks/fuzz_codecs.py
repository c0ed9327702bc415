"""The readers of codecs and of a store, for ``benchmarks.fuzz``.

Rows of every method, blobs of every codec, states, and sessions' records with their pages.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import thermocline
from benchmarks.forging import (
    Change,
    forged_blob,
    forged_record,
    forged_rows,
    forged_state,
    mended,
    mutated,
    within_blob,
)
from kvstore.blobs import format as blobs
from kvstore.blobs.chain import NAME_BYTES, ChainKeys, ChainMaker, as_tokens
from kvstore.blobs.packer import RAW, Packer, StoreCodecs
from kvstore.blobs.state_packer import with_windows, without_windows
from kvstore.blobs.state_tree import MatrixArray, StateArray, StateTree, WindowArray
from kvstore.codecs.base import Codec
from kvstore.codecs.catalogue import STATES
from kvstore.codecs.names import CODECS, LEARNABLE
from kvstore.codecs.presets import codec_by_name, open_codec
from kvstore.codecs.session_codec import AnyMatrixCodec, SessionCodec
from kvstore.codecs.states import EXACT_STATES, dealt_codec, matrix_codec
from kvstore.errors import Corrupt, Mismatch, Unusable
from kvstore.ledger.record import PAGE_CHUNKS, Records, SessionRecord
from kvstore.shapes import KVLayer, KVLayout, StoredModel
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile, model_run
from thermocline.method import SIDES, Method

# A token has so many values that a first chunk stores its first tokens compressed.
LAYOUT = KVLayout("bfloat16", (KVLayer(4, 64, 64),) * 2)
WINDOWS = KVLayout("bfloat16", (KVLayer(1, 32, 32),) * 2)
CHUNK = 16
CHAIN = ChainMaker("model", CHUNK).of_tokens(b"salt", as_tokens(range(4 * CHUNK)))
LEARNED = "learned "
# Parameters that give the shortest payloads, or payloads of more parts.
VARIANTS = (
    "kivi:bits=1,group=1024",
    "gear:bits=1,rank=0,outliers=0",
    "qjl:signs=1",
    "rabitq:bits=3,clusters=16",
    "vecinfer:bits=1",
    "rvq:bits=3",
    "tqprod:bits=2",
    "playground:key_bits=1,value_bits=1",
)


@dataclass(frozen=True)
class Target:
    """A reader, valid inputs, the exceptions that it may raise, and the changes of its inputs."""

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    changes: tuple[Change, ...] = (mutated,)


# ---- rows, as the library reads them


def method_names() -> list[str]:
    """Return the names of codecs without a profile, of learned ones, and of variants."""
    return [*codec_names(), *VARIANTS]


def codec_names() -> list[str]:
    ready = [name for name, entry in CODECS.items() if entry.make]
    return [*ready, *(LEARNED + name for name in LEARNABLE)]


def opened(name: str) -> tuple[Method, KVLayout]:
    """Return a method of ``method_names``, and a layout that it packs."""
    if name.startswith(LEARNED):
        return Method(learned_codec(name)), model_layout()
    return thermocline.codec(name), KVLayout("bfloat16", (KVLayer(2, 32, 32), KVLayer(1, 64, 16)))


def learned_codec(name: str) -> Codec:
    return open_codec(name.removeprefix(LEARNED), model_profile("bfloat16"))


def method_target(name: str) -> Target:
    method, layout = opened(name)
    runs = [method.pack_run(model_run(layout, 20, 1, first), first) for first in (0, 100)]
    if not name.startswith(LEARNED):
        sides = model_run(layout, 20, 2)[0]
        runs += [method.pack(x, y) for x, y in zip(sides, SIDES, strict=True)]
    seeds = tuple(x.tobytes() for x in runs)

    def read(data: bytes) -> None:
        packed = method.frombytes(data)
        method.restore_run(packed)
        layers = packed.layout.layers
        if len(layers) == 1 and packed.num_tokens and not all(sides := _dims(layers[0])):
            query = np.zeros((layers[0].num_kv_heads, 1, max(sides)), np.float32)
            with np.errstate(all="ignore"):  # changed first tokens may be no numbers
                method.scores(query, packed)

    allowed = (Corrupt, Mismatch)
    return Target(f"rows {name}", seeds, read, allowed, (mutated, forged_rows, forged_rows))


def _dims(layer: KVLayer) -> tuple[int, int]:
    return layer.head_dim, layer.value_dim


# ---- blobs of a store


def blob_target(name: str) -> Target:
    """Return a reader of chunks (a session's first among them) and of windows' rows."""
    is_learned = name.startswith(LEARNED)
    codec = learned_codec(name) if is_learned else codec_by_name(name)
    layout = model_layout() if is_learned else LAYOUT
    model = StoredModel("model", "model", layout, True, layout, 3 * CHUNK // 2)
    session = SessionCodec(codec, codec, EXACT_STATES)
    packer = Packer(StoreCodecs(codec, session, readable=(RAW,)), model)
    keys = ChainKeys(CHUNK, window_tokens=model.window_tokens)
    pieces = [*keys.chunks(CHAIN, 0, 2), *keys.windows(CHAIN, 3)]
    runs = [model_run(layout, x.num_tokens, 3, x.first_token) for x in pieces]
    seeds = [bytes(packer.pack_rows(x, run)) for x, run in zip(pieces, runs, strict=True)]
    by_key = {x.key: (x, layout.empty(x.num_tokens)) for x in pieces}

    def read(data: bytes) -> None:
        key = blobs.kind_of(data) + data[64:96]
        piece, out = by_key.get(key, by_key[pieces[0].key])
        packer.verify(data, piece)
        packer.unpack_rows(data, piece, out)

    changes = (mutated, mended, forged_blob)
    return Target(f"blob {name}", tuple(seeds), read, (Unusable,), changes)


# ---- states


def state_target(name: str) -> Target:
    """Return a reader of a state with matrices, one of zeros, and of two layers' windows."""
    values = np.random.default_rng(6).standard_normal((2, 4, 32), np.float32)
    arrays = [x[None] for pair in model_run(WINDOWS, CHUNK, 5, CHUNK) for x in pair]
    tree: StateTree = {
        "matrices": [MatrixArray("float32", values), MatrixArray("float32", values * 0)],
        "rows": [WindowArray("bfloat16", x, number) for number, x in enumerate(arrays)],
        "plain": ("ArraysCache", (StateArray("float32", np.arange(6, dtype=np.float32)), 3)),
        "more": {"offset": 7, "keys": StateArray("bfloat16", np.ones((2, 4), np.uint16))},
        "none": None,
    }
    model = StoredModel("model", "model", KVLayout("bfloat16", ()), True, WINDOWS, CHUNK)
    session = SessionCodec(RAW, None, _matrices(name))
    packer = Packer(StoreCodecs(RAW, session), model)
    piece = ChainKeys(CHUNK, window_tokens=CHUNK).state(CHAIN, 2)
    rest, rows = without_windows(tree, WINDOWS)
    assert rows is not None

    def read(data: bytes) -> object:
        return with_windows(packer.unpack_state(data, piece), rows)

    changes = (mended, within_blob(forged_state), within_blob(forged_state))
    seeds = (bytes(packer.pack_state(piece, rest)),)
    return Target(f"state {name}".strip(), seeds, read, (Unusable,), changes)


def _matrices(name: str) -> AnyMatrixCodec:
    learns = name in STATES and STATES[name].learns
    return dealt_codec(name, None, "0123456789") if learns else matrix_codec(name)


# ---- sessions' records


def record_target(*, of_page: bool) -> Target:
    """Return a reader of a record with two pages and further names, or of one of the pages."""
    model = StoredModel("model", "model", LAYOUT, True, WINDOWS, 3 * CHUNK)
    keys = ChainKeys(CHUNK, window_tokens=model.window_tokens)
    records = Records("model", Packer(RAW, model), keys)
    count = 2 * PAGE_CHUNKS + 3
    record = SessionRecord(
        tenant="t",
        id="a session",
        fingerprint="model",
        chunk_tokens=CHUNK,
        chain=random.Random(0).randbytes(count * NAME_BYTES),
        states=(3, PAGE_CHUNKS + 2, count),
        last_used_s=1.5,
        left_behind=bytes(2 * NAME_BYTES),
        note=bytes(2 * count),
    )
    key, head = records.key("t", "a session"), bytes(records.pack(record))
    pages = {x: bytes(records.pack_page(record, x)) for x in records.page_keys(record)}
    first = next(iter(pages))

    def read(head: bytes, pages: dict[bytes, bytes]) -> None:
        found = records.unpack(key, head, lambda wanted: [pages.get(x) for x in wanted])
        assert found.makes_sense() and len(found.names) == found.num_chunks
        assert records.is_usable(found) in (True, False)
        records.needed_keys(found)
        records.blob_keys(found)

    if of_page:
        changes: tuple[Change, ...] = (mutated, mended, forged_blob)
        seeds = tuple(pages.values())
        return Target("page", seeds, lambda x: read(head, {**pages, first: x}), (), changes)
    changes = (mutated, mended, within_blob(forged_record), within_blob(forged_record))
    return Target("record", (head,), lambda x: read(x, pages), (Unusable,), changes)


def codec_targets() -> dict[str, Callable[[], Target]]:
    """Return the function that makes each reader, by name: a process makes only its own."""
    found: dict[str, Callable[[], Target]] = {
        f"rows {x}": functools.partial(method_target, x) for x in method_names()
    }
    for name in codec_names():
        found[f"blob {name}"] = functools.partial(blob_target, name)
    for name in ("", *STATES):
        found[f"state {name}".strip()] = functools.partial(state_target, name)
    found["record"] = functools.partial(record_target, of_page=False)
    found["page"] = functools.partial(record_target, of_page=True)
    return found
