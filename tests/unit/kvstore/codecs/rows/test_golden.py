"""The wire format, frozen: rows from a hash, and a hash of the payload and of the restored rows.

Stored sessions are read by later versions and by other machines. If one of these fails, the
arithmetic has changed: either that was a mistake, or the codec needs a new id.
"""

from __future__ import annotations

import hashlib

import pytest

from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.rows.backend import reference_kernel
from kvstore.codecs.rows.row_codec import RowCodec
from kvstore.shapes import KVLayer, KVLayout
from tests.unit.kvstore.codecs.samples import frozen_rows

NUM_HEADS, NUM_TOKENS = 2, 40
# (payload, restored), 8 bytes of blake2b each
GOLDEN = {
    ("raw", 64): ("8957670f70758554", "8957670f70758554"),
    ("lm3", 64): ("08c0aa804c8d514f", "c1e69d6cb3c44403"),
    ("lm3", 256): ("22797e2bf6729978", "1ac2fc674beff9cd"),
    ("tq3", 16): ("4f1508df1d630e9f", "12645399800d118a"),
    ("tq3", 32): ("3149fdbbd988f6ac", "4421a06a8329149d"),
    ("tq3", 64): ("15eed42c53854ff9", "e324c670f88dcdd4"),
    ("tq3", 80): ("b0841d814b19dcbd", "64a0427d82156c59"),
    ("tq3", 96): ("2a80ebaee84e7b58", "88de00694aa33ca0"),
    ("tq3", 112): ("3956f15a59a0c945", "30ee4daf2292b4b8"),
    ("tq3", 128): ("878f1a4f0cc677c6", "89a7db9fc8169fb8"),
    ("tq3", 192): ("beb544645ab7760e", "87dc3f0c5f312e3d"),
    ("tq3", 256): ("d07f29b0d080de86", "984e4d9ea936d29d"),
    ("tq4", 16): ("af5cfe0dc39d3642", "415d0e3a500896ac"),
    ("tq4", 64): ("6c55769f5a29f313", "bc2975b1ce093781"),
    ("tq4", 96): ("9e141f743bb2f45b", "6b186aff2ec41ba3"),
    ("tq4", 128): ("85af05b38bac9e73", "892380ffb6cbdb20"),
    ("tq4", 256): ("58f8eb99d56607da", "039b44261fd68600"),
}


def frozen_run(dim):
    array = frozen_rows(NUM_HEADS * NUM_TOKENS, dim).reshape(NUM_HEADS, NUM_TOKENS, dim)
    value = array[::-1].copy()
    value[1, 20] = 0  # kept as it is
    return [(array, value)], KVLayout("bfloat16", (KVLayer(NUM_HEADS, dim, dim),))


def digest(*parts):
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def digests(codec, dim):
    run, layout = frozen_run(dim)
    payload = codec.encode(run, layout, 0)
    out = layout.empty(NUM_TOKENS)
    codec.decode(memoryview(payload), layout, 0, out)
    return digest(payload), digest(*(array.tobytes() for pair in out for array in pair))


@pytest.mark.parametrize(("name", "dim"), GOLDEN)
def test_payload_and_restored_values_are_frozen(name, dim):
    codec = codec_by_name(name)
    if isinstance(codec, RowCodec):
        codec = RowCodec(codec.id, codec.rows, backend=reference_kernel)
    assert digests(codec, dim) == GOLDEN[name, dim]


def test_the_input_is_frozen():
    assert digest(frozen_rows(80, 64).astype("<u2").tobytes()) == "b185dac474753caf"


def test_ids_are_frozen():
    names = ("raw", "lm3", "tq3", "tq4")
    assert [codec_by_name(name).id for name in names] == ["raw.1", "lm3.1", "tq3.2", "tq4.2"]
