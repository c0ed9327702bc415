"""The record of a session, and the pages of its chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given

from kvstore.blobs.chain import NAME_BYTES, PAGE, ChainKeys, Piece, joined
from kvstore.blobs.format import pack, parse
from kvstore.blobs.packer import Packer
from kvstore.codecs.presets import codec_by_name
from kvstore.errors import Corrupt, Mismatch, Unusable
from kvstore.ledger.record import (
    MAX_LEFT_BEHIND,
    PAGE_CHUNKS,
    Records,
    SessionRecord,
    abandoned_chunks,
)
from kvstore.shapes import StoredModel
from kvstore.tiers.base import Blob
from tests.kv_sessions import CHUNK, LAYOUT, kv_of, tokens


def records(fingerprint: str = "f", chunk_tokens: int = CHUNK, window_tokens: int = 0) -> Records:
    packer = Packer(codec_by_name("raw"), StoredModel("m", fingerprint, LAYOUT))
    return Records("m", packer, ChainKeys(chunk_tokens, window_tokens=window_tokens))


OURS = records()


def name(number: int, branch: int = 0) -> bytes:
    return number.to_bytes(16, "little") + branch.to_bytes(NAME_BYTES - 16, "little")


def record_of(num_chunks: int, note_bytes: int = 0, states: Sequence[int] = ()) -> SessionRecord:
    return SessionRecord(
        tenant="t",
        id="../../ \0 €",
        fingerprint="f",
        chunk_tokens=CHUNK,
        chain=joined([name(i) for i in range(num_chunks)]),
        states=tuple(states),
        last_used_s=1.5,
        packed_bytes=7,
        left_behind=name(9, 1),
        note=b"".join(i.to_bytes(4, "little")[:note_bytes] for i in range(num_chunks)),
    )


def key_of(record: SessionRecord) -> bytes:
    return OURS.key(record.tenant, record.id)


def stored(record: SessionRecord) -> dict[bytes, Blob]:
    """The record and its pages, by key."""
    pages = OURS.page_keys(record)
    return {key_of(record): OURS.pack(record)} | {x: OURS.pack_page(record, x) for x in pages}


def reader(blobs: dict[bytes, Blob]) -> Callable[[Sequence[bytes]], list[Blob | None]]:
    return lambda keys: [blobs.get(x) for x in keys]


def read(record: SessionRecord, blobs: dict[bytes, Blob]) -> SessionRecord:
    return OURS.unpack(key_of(record), blobs[key_of(record)], reader(blobs))


lengths = st.integers(0, 3 * PAGE_CHUNKS + 5)


@given(lengths, st.integers(0, 4), st.sets(st.integers(1, 3 * PAGE_CHUNKS), max_size=3))
@example(PAGE_CHUNKS, 4, {PAGE_CHUNKS})
@example(PAGE_CHUNKS - 1, 0, set())
def test_a_record_of_any_length_comes_back(num_chunks, note_bytes, states):
    record = record_of(num_chunks, note_bytes, sorted(x for x in states if x <= num_chunks))
    blobs = stored(record)
    assert read(record, blobs) == record
    assert len(blobs) == 1 + num_chunks // PAGE_CHUNKS
    assert len(blobs[key_of(record)]) < 600 + PAGE_CHUNKS * (NAME_BYTES + 4) + 34 * len(blobs)


def test_a_record_is_bound_to_its_key():
    record = record_of(5)
    blob = OURS.pack(record)
    assert records("later").unpack(key_of(record), blob, reader({})) == record
    with pytest.raises(Mismatch):
        OURS.unpack(OURS.key("t", "another"), blob, reader({}))
    chunk = b"c" + key_of(record)[1:]
    packer = Packer(codec_by_name("raw"), StoredModel("m", "f", LAYOUT))
    rows = packer.pack_rows(Piece(chunk, 0, CHUNK), kv_of(tokens(CHUNK)))
    with pytest.raises(Unusable):
        OURS.unpack(chunk, rows, reader({}))


def test_a_chain_that_grows_keeps_its_pages_and_sessions_share_them():
    one, longer = record_of(2 * PAGE_CHUNKS + 1), record_of(2 * PAGE_CHUNKS + 100)
    other = msgspec.structs.replace(longer, id="other", tenant="t")
    pages = [{k: y for k, y in stored(x).items() if k[:1] == PAGE} for x in (one, other)]
    assert pages[0] == pages[1]
    branch = msgspec.structs.replace(longer, chain=longer.chain[:-1000] + bytes(1000))
    assert len(stored(branch).keys() & stored(one).keys()) == 1 + 2


@pytest.mark.parametrize("how", ["gone", "cut", "swapped", "flipped", "of another codec"])
@given(
    num_chunks=st.integers(2 * PAGE_CHUNKS, 3 * PAGE_CHUNKS - 1),
    which=st.integers(0, 1),
    at=st.integers(0, 10**6),
)
def test_a_lost_page_costs_the_rest_of_the_chain_only(num_chunks, which, how, at):
    record = record_of(num_chunks, 2, [PAGE_CHUNKS // 2, PAGE_CHUNKS + 7, num_chunks])
    blobs = stored(record)
    pages = OURS.page_keys(record)
    good = bytes(blobs[pages[which]])
    if how == "gone":
        del blobs[pages[which]]
    elif how == "swapped":
        blobs[pages[which]] = blobs[pages[1 - which]]
    elif how == "cut":
        blobs[pages[which]] = good[: at % len(good)]
    elif how == "flipped":
        bad = bytearray(good)
        bad[at % len(bad)] ^= 1 << at % 8
        blobs[pages[which]] = bad
    else:
        header, payload = parse(good)
        blobs[pages[which]] = pack(OURS._packer.record_header(header.key), payload)
    found = read(record, blobs)
    assert found.num_chunks == which * PAGE_CHUNKS
    assert found.chain == record.chain[: len(found.chain)]
    assert found.note == record.note[: len(found.note)] and len(found.note) == 2 * found.num_chunks
    assert found.states == tuple(x for x in record.states if x <= found.num_chunks)
    assert (found.left_behind, found.packed_bytes) == (record.left_behind, record.packed_bytes)


def forged(record: SessionRecord, payload: bytes) -> dict[bytes, Blob]:
    """Any payload under right checksums, as a writer to an unsealed tier can make them."""
    header = OURS._packer.record_header(key_of(record))
    return {key_of(record): pack(header, payload)}


@given(st.binary(max_size=300))
def test_other_bytes_are_corrupt(noise):
    with pytest.raises(Corrupt):
        read(record_of(1), forged(record_of(1), noise))


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_changed_bytes_give_corrupt_or_a_record_that_makes_sense(at, mask):
    record = record_of(PAGE_CHUNKS + 3, 4, [2, PAGE_CHUNKS + 3])
    blobs = stored(record)
    raw = bytearray(parse(blobs[key_of(record)])[1])
    raw[at % len(raw)] ^= mask
    try:
        found = read(record, blobs | forged(record, bytes(raw)))
    except Corrupt:
        return
    assert found.makes_sense()
    assert all(len(x) == NAME_BYTES for x in found.names)
    assert OURS.is_usable(found) in (True, False) and OURS.blob_keys(found) is not None


CONTRADICTIONS = [
    *({"states": x} for x in ((0,), (-1,), (6,), (3, 2), (2, 2))),
    *({"chunk_tokens": x} for x in (0, -16)),
    *({"chain": bytes(81)}, {"left_behind": bytes(33)}, {"note": b"123"}),
    {"chain": bytes(40 * NAME_BYTES), "states": tuple(range(1, 41))},
]


@pytest.mark.parametrize("change", CONTRADICTIONS)
def test_a_record_that_contradicts_itself_is_corrupt(change):
    record = msgspec.structs.replace(record_of(5), **change)
    with pytest.raises(Corrupt, match="contradicts"):
        read(record, {key_of(record): OURS.pack(record)})


@pytest.mark.parametrize("claimed", [[b""], [b"x" * 31], [b"x" * 33], [b"x" * 32] * 30_000])
def test_pages_that_there_cannot_be_are_asked_of_no_tier(claimed):
    """A page that a record named 30,000 times was read and kept as often."""
    record = record_of(5)
    head = msgspec.msgpack.decode(parse(OURS.pack(record))[1])
    pages = next(i for i, x in enumerate(head.values()) if x == [])
    head[list(head)[pages]] = claimed
    asked: list[bytes] = []

    def no_page(keys: Sequence[bytes]) -> list[Blob | None]:
        asked.extend(keys)
        return [None] * len(keys)

    blobs = forged(record, msgspec.msgpack.encode(head))
    with pytest.raises(Corrupt):
        OURS.unpack(key_of(record), blobs[key_of(record)], no_page)
    assert asked == []


# ---- which blobs a session has


def test_blobs_are_listed_in_the_order_of_tokens_and_each_once():
    keyed = records(window_tokens=3 * CHUNK)
    record = record_of(PAGE_CHUNKS + 2, states=[PAGE_CHUNKS, PAGE_CHUNKS + 1])
    pieces = keyed.pieces(record)
    assert [x.end_token for x in pieces] == sorted(x.end_token for x in pieces)
    kinds = b"".join(x[:1] for x in keyed.blob_keys(record))
    assert len({*keyed.blob_keys(record)}) == len(kinds)
    counted = {x: kinds.count(x) for x in (b"c", b"p", b"s", b"w")}
    assert counted == {b"c": PAGE_CHUNKS + 2, b"p": 1, b"s": 2, b"w": 4}  # of 6
    older = {*keyed.blob_keys(record)} - {*keyed.needed_keys(record)}
    assert b"".join(sorted(x[:1] for x in older)) == b"sw"


def test_abandoned_chunks_are_remembered_up_to_a_bound():
    old = record_of(1500)
    new = [*old.names[:100], *(name(i, 2) for i in range(300))]
    left, rest = abandoned_chunks(old, new, 100)
    assert len(left) == MAX_LEFT_BEHIND * NAME_BYTES
    names = [*old.names[100:], old.left_behind]  # the newest branch comes first
    assert left == joined(names[:MAX_LEFT_BEHIND])
    assert rest == [b"c" + x for x in names[MAX_LEFT_BEHIND:]]
    # A user who returns to a branch has it again.
    back = msgspec.structs.replace(old, left_behind=left)
    assert abandoned_chunks(back, old.names, 1500)[0] == b""
