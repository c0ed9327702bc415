from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupt
from kvstore.tiers.redis_server.fragments import (
    FRAGMENT_BYTES,
    MANIFEST_BYTES,
    MAX_BLOB_BYTES,
    BlobManifest,
    cut,
    entry_names,
    fragment_names,
    manifest_name,
    new_manifest,
    parse_manifest,
    parse_manifest_name,
    verified,
)


@pytest.mark.parametrize(
    ("length", "count"),
    [(0, 0), (1, 0), (FRAGMENT_BYTES, 0), (FRAGMENT_BYTES + 1, 2), (2 * FRAGMENT_BYTES, 2)],
)
def test_a_blob_is_cut_and_joined(length: int, count: int) -> None:
    blob = bytes(range(256)) * (length // 256 + 1)
    blob = blob[:length]
    manifest = new_manifest(blob)
    fragments = dict(cut(b"k", manifest, blob))
    assert (manifest.num_fragments, len(fragments)) == (count, count)
    assert list(fragments) == fragment_names(b"k", manifest)
    assert parse_manifest(manifest.pack() + b"payload") == manifest
    assert verified(b"".join(fragments.values()) if count else blob, manifest) == blob


@given(st.binary(max_size=64))
def test_strange_manifests_are_refused_or_bounded(raw: bytes) -> None:
    try:
        manifest = parse_manifest(raw)
    except Corrupt:
        return
    assert manifest.length <= MAX_BLOB_BYTES


@given(st.integers(0, 8 * (MANIFEST_BYTES - 8) - 1))  # the generation only leads to the fragments
def test_a_flipped_bit_in_the_manifest_never_passes(bit: int) -> None:
    blob = bytes(1000)
    raw = bytearray(new_manifest(blob).pack())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        verified(blob, parse_manifest(bytes(raw)))


def test_a_manifest_cannot_ask_for_more_fragments_than_its_length_needs() -> None:
    for manifest in (
        BlobManifest(0, 10, 5, 0),
        BlobManifest(0, FRAGMENT_BYTES + 1, 1, 0),
        BlobManifest(0, MAX_BLOB_BYTES + 1, 4200, 0),
    ):
        with pytest.raises(Corrupt):
            parse_manifest(manifest.pack())


@given(st.binary(max_size=64))
def test_names_carry_the_key_and_keep_a_blob_in_one_slot(key: bytes) -> None:
    manifest = new_manifest(bytes(3 * FRAGMENT_BYTES))
    assert parse_manifest_name(manifest_name(key)) == key
    names = entry_names(key, manifest)
    assert {name[name.index(b"{") : name.index(b"}")] for name in names} == {
        b"{" + key.hex().encode()
    }
    assert [parse_manifest_name(name) for name in names[1:]] == [None] * 3


def test_two_writes_share_no_fragment_name() -> None:
    names = [fragment_names(b"k", new_manifest(bytes(FRAGMENT_BYTES + 1))) for _ in range(2)]
    assert not set(names[0]) & set(names[1])


@pytest.mark.parametrize("name", [b"", b"other", b"thermocline:{zz}", b"thermocline:{00", b"{00}"])
def test_foreign_names_hold_no_key(name: bytes) -> None:
    assert parse_manifest_name(name) is None
