from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupt
from kvstore.tiers.redis_pieces import (
    HEAD_BYTES,
    MAX_BLOB_BYTES,
    PIECE_BYTES,
    Head,
    all_names,
    checked,
    head_name,
    key_in,
    new_head,
    parse_head,
    piece_names,
    pieces,
)


@pytest.mark.parametrize(
    ("length", "count"),
    [(0, 0), (1, 0), (PIECE_BYTES, 0), (PIECE_BYTES + 1, 2), (2 * PIECE_BYTES, 2)],
)
def test_a_blob_is_cut_and_joined(length: int, count: int) -> None:
    blob = bytes(range(256)) * (length // 256 + 1)
    blob = blob[:length]
    head = new_head(blob)
    parts = dict(pieces(b"k", head, blob))
    assert (head.num_pieces, len(parts)) == (count, count)
    assert list(parts) == piece_names(b"k", head)
    assert parse_head(head.pack() + b"payload") == head
    assert checked(b"".join(parts.values()) if count else blob, head) == blob


@given(st.binary(max_size=64))
def test_strange_heads_are_refused_or_bounded(raw: bytes) -> None:
    try:
        head = parse_head(raw)
    except Corrupt:
        return
    assert head.length <= MAX_BLOB_BYTES


@given(st.integers(0, 8 * (HEAD_BYTES - 8) - 1))  # the generation only leads to the pieces
def test_a_flipped_bit_in_the_head_never_passes(bit: int) -> None:
    blob = bytes(1000)
    raw = bytearray(new_head(blob).pack())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        checked(blob, parse_head(bytes(raw)))


def test_a_head_cannot_ask_for_more_pieces_than_its_length_needs() -> None:
    for head in (
        Head(0, 10, 5, 0),
        Head(0, PIECE_BYTES + 1, 1, 0),
        Head(0, MAX_BLOB_BYTES + 1, 4200, 0),
    ):
        with pytest.raises(Corrupt):
            parse_head(head.pack())


@given(st.binary(max_size=64))
def test_names_carry_the_key_and_keep_a_blob_in_one_slot(key: bytes) -> None:
    head = new_head(bytes(3 * PIECE_BYTES))
    assert key_in(head_name(key)) == key
    names = all_names(key, head)
    assert {name[name.index(b"{") : name.index(b"}")] for name in names} == {
        b"{" + key.hex().encode()
    }
    assert [key_in(name) for name in names[1:]] == [None] * 3


def test_two_writes_share_no_piece_name() -> None:
    names = [piece_names(b"k", new_head(bytes(PIECE_BYTES + 1))) for _ in range(2)]
    assert not set(names[0]) & set(names[1])


@pytest.mark.parametrize("name", [b"", b"other", b"thermocline:{zz}", b"thermocline:{00", b"{00}"])
def test_foreign_names_hold_no_key(name: bytes) -> None:
    assert key_in(name) is None
