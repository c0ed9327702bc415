"""A million mutations of everything that is read from outside: only typed errors, or an answer.

    python benchmarks/fuzz.py [--count N] [--seconds 480] [--seed 0] [--only NAME] [--json OUT]

Blobs (as they are, and with checksums made right again, so that headers and payloads are reached),
states, session records, profiles, and the control messages of both sides. Each reader may give an
answer or raise an exception that it documents; anything else is printed with the input, and the
exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.stacks.product_stack import write_json
from engines.vllm_plugin import messages as vllm_messages
from engines.wire import (
    ControlReply,
    ControlRequest,
    Demote,
    Done,
    Hello,
    Prefetch,
    WireError,
    absent,
    frame,
    read_from_engine,
    read_request,
)
from kvstore.blobs import format as blobs
from kvstore.blobs.chain import NAME_BYTES, ChainKeys, Piece
from kvstore.blobs.packer import Packer
from kvstore.blobs.state_tree import StateArray, StateTree, decode_state, encode_state
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.profile import Profile, load_profile
from kvstore.errors import Unusable
from kvstore.ledger.record import PAGE_CHUNKS, Records, SessionRecord
from kvstore.session import SessionRef
from kvstore.shapes import KVLayer, KVLayout, StoredModel

LAYOUT = KVLayout("bfloat16", (KVLayer(1, 32, 32),) * 2)
CHUNK = 16
PIECE = Piece(b"c" + bytes(range(32)), 4, CHUNK)
MODEL = StoredModel("model", "fingerprint", LAYOUT)
SESSION = SessionRef("tenant", "session", b"salt")
PER_TURN = 50  # mutations of one target before the next
SHOWN = 10
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 64) - 1)


@dataclass(frozen=True)
class Target:
    """A reader, good inputs, and the exceptions that it may raise."""

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]


def mutated(chance: random.Random, seed: bytes, other: bytes) -> bytes:
    """Change a good input in one to four ways."""
    data = bytearray(seed)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 2 if data:
                data[at % len(data)] = chance.randrange(256)
            case 3:
                del data[at:]
            case 4:
                del data[at : at + chance.randint(1, 16)]
            case 5:
                data[at:at] = chance.randbytes(chance.randint(1, 16))
            case 6:
                size = chance.choice((1, 2, 4, 8))
                number = chance.choice(EXTREMES) & ((1 << 8 * size) - 1)
                data[at : at + size] = number.to_bytes(size, chance.choice(("little", "big")))
            case 7 if other:
                start = chance.randrange(len(other))
                data[at : at + 32] = other[start : start + 32]
    return bytes(data)


# ---- the inputs


def rows() -> list[tuple[np.ndarray, np.ndarray]]:
    chance, run = np.random.default_rng(0), LAYOUT.empty(CHUNK)
    for array in (x for pair in run for x in pair):
        values = chance.standard_normal(array.shape, np.float32)
        array[...] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return run


def blob_targets() -> Iterator[Target]:
    for name in ("raw", "tq3", "lm3"):
        packer, out = Packer(codec_by_name(name), MODEL), LAYOUT.empty(CHUNK)
        blob = bytes(packer.pack_rows(PIECE, rows()))

        def unpack(data: bytes, packer: Packer = packer, out: Any = out) -> None:
            packer.unpack_rows(data, PIECE, out)

        def mended(data: bytes, unpack: Callable[[bytes], None] = unpack) -> None:
            unpack(with_right_checksum(data))

        yield Target(f"blob {name}", (blob,), unpack, (Unusable,))
        yield Target(f"blob {name}, checksum mended", (blob,), mended, (Unusable,))


def with_right_checksum(data: bytes) -> bytes:
    """Make the checksum and the stated length right, so that a reader goes on after them."""
    head, tail = bytearray(data[: blobs.HEADER_BYTES]), data[blobs.HEADER_BYTES :]
    if len(head) < blobs.HEADER_BYTES:
        return data
    head[120:128] = len(tail).to_bytes(8, "little")
    crc = blobs._checksum(bytes(head[:128]), tail)
    return bytes(head[:128]) + crc.to_bytes(4, "little") + tail


def state_target() -> Target:
    tree: StateTree = [
        ("ArraysCache", (StateArray("float32", np.arange(6, dtype=np.float32)), 3)),
        {"offset": 7, "keys": StateArray("bfloat16", np.ones((2, 4), np.uint16)), "none": None},
    ]
    return Target(
        "state", (encode_state(tree),), lambda x: decode_state(memoryview(x)), (Unusable,)
    )


def record_targets() -> Iterator[Target]:
    packer, keys = Packer(codec_by_name("tq3"), MODEL), ChainKeys(CHUNK)
    records = Records("model", packer, keys)
    record = SessionRecord(
        tenant="t",
        id="a session",
        fingerprint="fingerprint",
        chunk_tokens=CHUNK,
        chain=random.Random(0).randbytes((PAGE_CHUNKS + 3) * NAME_BYTES),
        states=(3, PAGE_CHUNKS + 2),
        last_used_s=1.5,
        left_behind=bytes(2 * NAME_BYTES),
        note=bytes(2 * (PAGE_CHUNKS + 3)),
    )
    key = records.key("t", "a session")
    (page,) = (x.key for x in records.pieces(record) if x.is_page)
    head, names = bytes(records.pack(record)), bytes(records.pack_page(record, page))

    def read(data: bytes) -> None:
        records.unpack(key, data, lambda wanted: [names for _ in wanted])

    yield Target("record", (head,), lambda x: read(with_right_checksum(x)), (Unusable,))
    yield Target(
        "page of a record",
        (names,),
        lambda x: used(records.unpack(key, head, lambda wanted: [with_right_checksum(x)])),
        (Unusable,),
    )


def used(record: SessionRecord) -> None:
    """Read all that a record says of itself."""
    assert record.makes_sense() and len(record.names) == record.num_chunks


def profile_target(folder: Path) -> Target:
    path = folder / "profile"
    learned: dict[str, dict[str, np.ndarray]] = {
        "dense3": {"scale": np.ones(4, np.float32), "codes": np.arange(9, dtype=np.int16)}
    }
    Profile("model", LAYOUT, (None, None), learned).save(path)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        load_profile(path)

    return Target("profile", (path.read_bytes(),), read, (Unusable,))


def wire_targets(loop: asyncio.AbstractEventLoop) -> Iterator[Target]:
    requests: tuple[Any, ...] = (Hello("token"), Prefetch(SESSION), Demote(SESSION, "disk"))
    seeds = tuple(frame(ControlRequest(i, x)) for i, x in enumerate(requests))
    answers = (frame(ControlReply(1, Done(absent(SESSION)))), frame(ControlReply(2, Done(None))))

    def reader(function: Callable[[asyncio.StreamReader], Any]) -> Callable[[bytes], object]:
        async def feed(data: bytes) -> object:
            stream = asyncio.StreamReader(limit=1 << 20)
            stream.feed_data(data)
            stream.feed_eof()
            return await function(stream)

        return lambda data: loop.run_until_complete(feed(data))

    allowed = (WireError, asyncio.IncompleteReadError)
    yield Target("control message", seeds, reader(read_request), allowed)
    yield Target("control answer", answers, reader(read_from_engine), allowed)
    stage = vllm_messages.Stage(3, SESSION, 1, bytes(64))
    hub = (vllm_messages.frame(stage)[4:], vllm_messages.frame(vllm_messages.FrontHello())[4:])
    decoders = (
        vllm_messages.decode_to_rank,
        vllm_messages.decode_from_peer,
        vllm_messages.decode_to_front,
    )
    for decode in decoders:
        # The hub and the ranks take a ``ValueError`` for a broken peer.
        yield Target(decode.__name__, hub, decode, (ValueError,))


def targets(folder: Path, loop: asyncio.AbstractEventLoop) -> list[Target]:
    return [
        *blob_targets(),
        state_target(),
        *record_targets(),
        profile_target(folder),
        *wire_targets(loop),
    ]


# ---- the run


def fuzz(
    chosen: list[Target], count: int, seconds: float, seed: int
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Mutate and read until one of the bounds is met. Returns outcomes by target, and defects."""
    chance, until = random.Random(seed), time.monotonic() + seconds
    outcomes: dict[str, Counter[str]] = {x.name: Counter() for x in chosen}
    defects: list[str] = []
    done = 0
    while done < count and time.monotonic() < until:
        for target in chosen:
            for _ in range(min(PER_TURN, count - done)):
                first, other = chance.choice(target.seeds), chance.choice(target.seeds)
                data = mutated(chance, first, other)
                outcomes[target.name][outcome(target, data, defects)] += 1
                done += 1
    return outcomes, defects


def outcome(target: Target, data: bytes, defects: list[str]) -> str:
    try:
        target.read(data)
        return "read"
    except target.allowed:
        return "refused"
    except BaseException as error:  # any other exception is a defect
        if isinstance(error, KeyboardInterrupt):
            raise
        if len(defects) < SHOWN:
            defects.append(f"{target.name}: {type(error).__name__}: {error}: {data.hex()[:2000]}")
        return type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets whose names hold this")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    began, loop = time.monotonic(), asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        chosen = [x for x in targets(Path(folder), loop) if args.only in x.name]
        found, defects = fuzz(chosen, args.count, args.seconds, args.seed)
    loop.close()
    for line in defects:
        print(line, file=sys.stderr)
    total = sum(x.total() for x in found.values())
    result = {"mutations": total, "seconds": round(time.monotonic() - began, 1)}
    write_json(args.json, {**result, "outcomes": found, "defects": len(defects)})
    sys.exit(bool(defects))


assert issubclass(msgspec.DecodeError, ValueError)

if __name__ == "__main__":
    main()
