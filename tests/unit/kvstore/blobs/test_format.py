from __future__ import annotations

import struct

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvstore.blobs.chain import CHUNK
from kvstore.blobs.format import (
    HEADER_BYTES,
    Header,
    codec_field,
    fingerprint_digest,
    layout_digest,
    pack,
    parse,
)
from kvstore.errors import Corrupt, Mismatch, Unusable
from kvstore.shapes import KVLayer, KVLayout

LAYOUT = KVLayout("bfloat16", (KVLayer(2, 64, 64),))
HEADER = Header(
    key=CHUNK + bytes(range(32)),
    codec=b"raw.1",
    fingerprint=fingerprint_digest("model"),
    layout=layout_digest(LAYOUT),
    first_token=128,
    num_tokens=16,
)
PAYLOAD = bytes(range(256)) * 3
BLOB = pack(HEADER, PAYLOAD)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_packed_blob_comes_back_as_a_view_of_the_tiers_bytes(kind):
    blob = kind(BLOB)
    header, payload = parse(blob)
    assert (header, payload) == (HEADER, PAYLOAD)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), np.frombuffer(blob, np.uint8))
    assert parse(pack(HEADER, b""))[1] == b""


def test_the_bytes_are_frozen():
    """Older blobs must stay readable: a change of these bytes needs a new format version."""
    assert BLOB[:8] == b"TCKV\x03\x00c\x00"
    assert BLOB[8:32] == b"raw.1".ljust(24, b"\0")
    assert BLOB[64:96] == bytes(range(32))
    assert struct.unpack_from("<IIQ", BLOB, 112) == (128, 16, len(PAYLOAD))
    assert HEADER_BYTES == 132


def test_every_changed_header_byte_is_noticed():
    for at in range(HEADER_BYTES):
        for mask in (0x01, 0x80, 0xFF):
            assert_unusable(flipped(BLOB, at, mask))


@given(st.integers(0, len(BLOB) - 1), st.integers(1, 255))
def test_every_changed_byte_is_noticed(at, mask):
    assert_unusable(flipped(BLOB, at, mask))


def test_every_cut_is_noticed():
    for length in range(len(BLOB)):
        assert_unusable(BLOB[:length])


@given(st.binary(min_size=1, max_size=300))
def test_every_addition_is_noticed(more):
    assert_unusable(BLOB + more)


@given(st.binary(max_size=400))
def test_other_bytes_are_no_blob(noise):
    assert_unusable(noise)


def test_a_huge_declared_length_is_refused_before_anything_is_read():
    head = bytearray(BLOB)
    struct.pack_into("<Q", head, 120, 1 << 62)
    with pytest.raises(Corrupt, match="payload bytes"):
        parse(head)


@pytest.mark.parametrize(("at", "value"), [(4, 2), (4, 4), (5, 1), (7, 1), (7, 0x80)])
def test_a_later_version_or_unknown_flags_are_another_releases_blob(at, value):
    head = bytearray(BLOB)
    head[at] = value
    with pytest.raises(Mismatch, match="another release"):
        parse(head)


def test_layouts_differ_in_every_number():
    layers = [(2, 64, 64), (4, 64, 64), (2, 128, 64), (2, 64, 128)]
    digests = {
        layout_digest(KVLayout(dtype, (KVLayer(*x),)))
        for x in layers
        for dtype in ("bfloat16", "float16", "float32")
    }
    assert len(digests) == 12
    assert layout_digest(KVLayout("float16", (KVLayer(2, 64, 64),) * 2)) not in digests


@pytest.mark.parametrize("bad", ["", "x" * 25, "tq³"])
def test_codec_ids_must_fit_the_header(bad):
    with pytest.raises(ValueError):
        codec_field(bad)


def flipped(blob: bytes, at: int, mask: int) -> bytes:
    return blob[:at] + bytes([blob[at] ^ mask]) + blob[at + 1 :]


def assert_unusable(blob: bytes) -> None:
    with pytest.raises(Unusable):
        parse(blob)
