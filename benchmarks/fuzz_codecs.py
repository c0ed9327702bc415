"""What ``benchmarks.fuzz`` reads by codecs: rows of every method, blobs of a store, and states."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

import thermocline
from benchmarks.forging import forged_rows, forged_state, mutated
from kvstore.blobs import format as blobs
from kvstore.blobs.chain import Piece
from kvstore.blobs.packer import Packer
from kvstore.blobs.state_packer import pack_matrices, unpack_matrices
from kvstore.blobs.state_tree import (
    MatrixArray,
    StateArray,
    StateTree,
    decode_state,
    encode_state,
)
from kvstore.blobs.store_codecs import StoreCodecs
from kvstore.codecs.catalogue import STATES
from kvstore.codecs.names import CODECS, LEARNABLE
from kvstore.codecs.presets import codec_by_name, open_codec
from kvstore.codecs.session_codec import AnyMatrixCodec
from kvstore.codecs.states import dealt_codec, matrix_codec
from kvstore.errors import Corrupt, Mismatch, Unusable
from kvstore.shapes import KVLayer, KVLayout, StoredModel
from tests.unit.kvstore.codecs.learning.calibration import model_layout, model_profile, model_run
from thermocline.method import SIDES, Method

# Changes a good input; arguments: source of chance, the input, another one.
Change: TypeAlias = Callable[[random.Random, bytes, bytes], bytes]

LAYOUT = KVLayout("bfloat16", (KVLayer(1, 32, 32),) * 2)
CHUNK = 16
PIECES = tuple(Piece(b"c" + bytes(range(32)), first, CHUNK) for first in (0, CHUNK))
MODEL = StoredModel("model", "fingerprint", LAYOUT)
MENDED = ", checksum mended"
# Parameters with which payloads are shortest, or have more parts.
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
    """A reader, good inputs, the exceptions that it may raise, and how its inputs are changed."""

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    changes: tuple[Change, ...] = (mutated,)


# ---- rows, as the library reads them


def method_names() -> list[str]:
    """Every codec that is made without a profile, those that a profile makes, and variants."""
    ready = [name for name, entry in CODECS.items() if entry.make]
    return [*ready, *VARIANTS, *(f"learned {name}" for name in LEARNABLE)]


def opened(name: str) -> tuple[Method, KVLayout]:
    """Return a method of ``method_names``, and a layout that it packs."""
    learned = name.removeprefix("learned ")
    if learned == name:
        layout = KVLayout("bfloat16", (KVLayer(2, 32, 32), KVLayer(1, 64, 16)))
        return thermocline.codec(name), layout
    return Method(open_codec(learned, model_profile("bfloat16"))), model_layout()


def method_target(name: str) -> Target:
    method, layout = opened(name)
    runs = [method.pack_run(model_run(layout, 20, 1, first), first) for first in (0, 100)]
    if not name.startswith("learned"):
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

    allowed = (Corrupt, Mismatch, thermocline.NoScores)
    return Target(f"rows {name}", seeds, read, allowed, (mutated, forged_rows, forged_rows))


def _dims(layer: KVLayer) -> tuple[int, int]:
    return layer.head_dim, layer.value_dim


# ---- blobs of a store


def blob_target(name: str, is_mended: bool) -> Target:
    """Read blobs of a codec, or of a learned one whose header names another that is known."""
    if not name.startswith("learned"):
        packer = Packer(codec_by_name(name), MODEL)
        return _of_blobs(name, is_mended, packer)
    layout, profile = model_layout(), model_profile("bfloat16")
    codecs = [open_codec(x, profile) for x in ("dense3", "max")]
    packer = Packer(
        StoreCodecs(codecs[1], readable=tuple(codecs)), StoredModel("model", "fingerprint", layout)
    )
    return _of_blobs(name, is_mended, packer)


def _of_blobs(name: str, is_mended: bool, packer: Packer) -> Target:
    layout = packer.layout
    seeds = tuple(
        bytes(packer.pack_rows(x, model_run(layout, CHUNK, 3, x.first_token), codec))
        for codec in packer.codecs.known
        for x in PIECES
    )
    out = layout.empty(CHUNK)

    def read(data: bytes) -> None:
        data = with_right_checksum(data) if is_mended else data
        header, payload = blobs.parse(data)
        piece = PIECES[header.first_token == CHUNK]
        packer.check(blobs.VerifiedBlob(data, header, payload), piece)
        packer.unpack_rows(data, piece, out)

    return Target(f"blob {name}{MENDED if is_mended else ''}", seeds, read, (Unusable,))


def with_right_checksum(data: bytes) -> bytes:
    """Make the checksum and the stated length right, so that a reader goes on after them."""
    head, tail = bytearray(data[: blobs.HEADER_BYTES]), data[blobs.HEADER_BYTES :]
    if len(head) < blobs.HEADER_BYTES:
        return data
    head[120:128] = len(tail).to_bytes(8, "little")
    crc = blobs._checksum(bytes(head[:128]), tail)
    return bytes(head[:128]) + crc.to_bytes(4, "little") + tail


# ---- states


def state_target(name: str) -> Target:
    changes: tuple[Change, ...] = (mutated, forged_state)
    if name:
        learns = STATES[name].learns
        matrices = dealt_codec(name, None, "0123456789") if learns else matrix_codec(name)
        return _packed_state(name, matrices, changes)
    plain: StateTree = [
        ("ArraysCache", (StateArray("float32", np.arange(6, dtype=np.float32)), 3)),
        {"offset": 7, "keys": StateArray("bfloat16", np.ones((2, 4), np.uint16)), "none": None},
    ]
    seeds = (encode_state(plain),)
    return Target("state", seeds, lambda x: decode_state(memoryview(x)), (Unusable,), changes)


def _packed_state(name: str, matrices: AnyMatrixCodec, changes: tuple[Change, ...]) -> Target:
    """A state with matrices, one of them of zeros."""
    values = np.random.default_rng(6).standard_normal((2, 4, 32), np.float32)
    tree: StateTree = [MatrixArray("float32", values), MatrixArray("float32", values * 0)]
    seed = encode_state(pack_matrices(tree, matrices))

    def read(data: bytes) -> object:
        return unpack_matrices(decode_state(memoryview(data)), [matrices.id])

    return Target(f"state {name}", (seed,), read, (Unusable,), changes)


def codec_targets() -> dict[str, Callable[[], Target]]:
    """What makes each of them, by name: a process makes only its own."""
    found: dict[str, Callable[[], Target]] = {
        f"rows {x}": functools.partial(method_target, x) for x in method_names()
    }
    for name in ("raw", "tq3", "lm3", "learned"):
        for end, is_mended in (("", False), (MENDED, True)):
            found[f"blob {name}{end}"] = functools.partial(blob_target, name, is_mended)
    for name in ("", *STATES):
        found[f"state {name}".strip()] = functools.partial(state_target, name)
    return found
