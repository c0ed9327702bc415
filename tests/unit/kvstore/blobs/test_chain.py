from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvstore.blobs.chain import KEY_BYTES, KINDS, KeySpace, as_tokens, common_prefix

SIZE = 16


def space(fingerprint="f", size=SIZE, model="m") -> KeySpace:
    return KeySpace(fingerprint, size, model)


def chunk_keys(tokens, salt=b"salt", keys=None) -> list[bytes]:
    keys = keys or space()
    return keys.chain(keys.root(salt), as_tokens(tokens)).chunk_keys


def test_equal_prefixes_have_equal_keys_and_only_they():
    a = chunk_keys(range(64))
    b = chunk_keys([*range(40), 99, *range(41, 64)])
    assert len(a) == 4
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])


def test_a_chunk_key_names_all_tokens_before_it():
    same_chunk_elsewhere = chunk_keys([7] * SIZE + list(range(SIZE)))[1]
    assert same_chunk_elsewhere != chunk_keys(range(SIZE))[0]


@pytest.mark.parametrize(
    "other",
    [
        {"salt": b"other"},
        {"salt": b""},
        {"keys": space(fingerprint="g")},
        {"keys": space(size=32)},
    ],
)
def test_each_difference_that_forbids_sharing_changes_every_key(other):
    assert not set(chunk_keys(range(64))) & set(chunk_keys(range(64), **other))


def test_fields_cannot_run_into_each_other():
    keys = space()
    assert space(fingerprint="ab").root(b"c") != space("abc").root(b"")
    assert keys.record_key("a", "bc") != keys.record_key("ab", "c")


def test_the_tail_belongs_to_one_session():
    keys = space()
    chain = keys.chain(keys.root(b"salt"), as_tokens(range(20)))
    names = {chain.tail_key(t, i) for t, i in (("a", "x"), ("a", "y"), ("b", "x"))}
    longer = keys.chain(keys.root(b"salt"), as_tokens(range(21)))
    assert len(names | {longer.tail_key("a", "x")}) == 4


def test_a_snapshot_belongs_to_its_exact_prefix():
    keys = space()
    one = keys.chain(keys.root(b"salt"), as_tokens(range(60)))
    two = keys.chain(keys.root(b"salt"), as_tokens([*range(40), *range(100, 150)]))
    for position in (1, 15, 16, 17, 32, 40):
        assert one.snapshot_key(position) == two.snapshot_key(position)
    assert one.snapshot_key(41) != two.snapshot_key(41)
    assert len({one.snapshot_key(x) for x in range(1, 61)}) == 60


@pytest.mark.parametrize("position", [0, -1, 61])
def test_no_snapshot_outside_the_tokens(position):
    keys = space()
    with pytest.raises(ValueError, match="no snapshot"):
        keys.chain(keys.root(b""), as_tokens(range(60))).snapshot_key(position)


@given(st.text(), st.text(), st.binary())
def test_any_id_makes_a_key_of_fixed_size(tenant, session_id, salt):
    keys = space()
    record = keys.record_key(tenant, session_id)
    assert len(record) == KEY_BYTES
    assert record[:1] in KINDS
    assert len(keys.root(salt)) == KEY_BYTES - 1


@pytest.mark.parametrize("odd", ["../../x", "a\0b", "x" * 4096, "\ud800", "€:@", ""])
def test_odd_ids_differ(odd):
    keys = space()
    assert keys.record_key("t", odd) != keys.record_key("t", odd + "x")
    assert keys.record_key(odd, "s") != keys.record_key(odd + "x", "s")


def test_keys_are_frozen():
    """Stored sessions are found by these names: a change of them needs a new format version."""
    keys = space()
    chain = keys.chain(keys.root(b"salt"), as_tokens(range(40)))
    names = [*chain.chunk_keys, chain.tail_key("t", "s"), chain.snapshot_key(33)]
    names.append(keys.record_key("t", "s"))
    assert [x.hex()[:18] for x in names] == [
        "63e83ccec01cc54683",
        "63886f54b58f240b0b",
        "74862e4f00f1729f37",
        "7306d709aef3f1ea12",
        "72f439a017f453ae4e",
    ]


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix(a, b):
    n = common_prefix(as_tokens(a), as_tokens(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_tokens_are_little_endian_int32():
    assert as_tokens([1, 2**31 - 1]).tobytes() == b"\1\0\0\0\xff\xff\xff\x7f"
    assert as_tokens(np.arange(3, dtype=np.int64)).dtype == np.dtype("<i4")
    with pytest.raises(OverflowError):
        as_tokens([2**31])
