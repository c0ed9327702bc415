from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvstore.errors import Corrupt
from kvstore.store.records import SessionRecord, decode_record, encode_record

RECORD = SessionRecord(
    tenant="t",
    id="../../ \0 €",
    fingerprint="f",
    codecs=("tq3.2",),
    root=bytes(32),
    token_ids=bytes(range(80)),
    tail_tokens=4,
    snapshots=(3, 20),
    last_used_s=1.5,
)


def test_a_record_comes_back():
    assert decode_record(memoryview(encode_record(RECORD)), SessionRecord) == RECORD
    assert RECORD.num_tokens == 20
    assert RECORD.tokens[0] == 0x03020100


@given(st.binary(max_size=300))
def test_other_bytes_are_corrupt(noise):
    with pytest.raises(Corrupt):
        decode_record(memoryview(noise), SessionRecord)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_changed_bytes_give_corrupt_or_a_record_that_makes_sense(at, mask):
    raw = bytearray(encode_record(RECORD))
    raw[at % len(raw)] ^= mask
    try:
        record = decode_record(memoryview(raw), SessionRecord)
    except Corrupt:
        return
    assert all(0 < x <= record.num_tokens for x in record.snapshots)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": bytes(81)},
        {"tail_tokens": 21},
        {"tail_tokens": -1},
        {"snapshots": (0,)},
        {"snapshots": (21,)},
        {"root": bytes(31)},
        {"left_behind": bytes(33)},
        {"codecs": ("raw.1",) * 17},
    ],
)
def test_a_record_that_contradicts_itself_is_corrupt(change):
    raw = encode_record(msgspec.structs.replace(RECORD, **change))
    with pytest.raises(Corrupt, match="contradicts"):
        decode_record(memoryview(raw), SessionRecord)
