"""The wire format, frozen: rows from a hash, and a hash of what becomes of them.

Stored sessions are read by later versions and by other machines. If one of these fails, the
arithmetic has changed: either that was a mistake, or the codec needs a new id.
"""

from __future__ import annotations

import hashlib

import pytest

from kvstore.codecs.backend import reference_kernel
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.row_codec import RowCodec
from kvstore.shapes import KVLayer, KVLayout
from tests.unit.kvstore.codecs.samples import frozen_rows

NUM_HEADS, NUM_TOKENS = 2, 40
# (payload, restored), 8 bytes of blake2b each
GOLDEN = {
    ("raw", 64): ("8957670f70758554", "8957670f70758554"),
    ("lm3", 64): ("08c0aa804c8d514f", "c1e69d6cb3c44403"),
    ("lm3", 256): ("22797e2bf6729978", "1ac2fc674beff9cd"),
    ("tq3", 16): ("acc1ef660fc793e5", "4ec98e839350a68f"),
    ("tq3", 32): ("5bb5e42e689e315c", "0efe393530616b28"),
    ("tq3", 64): ("3d0fc66ca430a925", "dfb7943acab91c61"),
    ("tq3", 80): ("bba2798547a4cb7d", "f6f35f92ccb975bd"),
    ("tq3", 96): ("73b180c478512d9b", "7952901844517a97"),
    ("tq3", 112): ("876a66120052c69b", "168848f3c94b02b0"),
    ("tq3", 128): ("8d554b0c856f8154", "e2b87158b72675b6"),
    ("tq3", 192): ("113fc2930e58f46c", "b24e7941e223b539"),
    ("tq3", 256): ("cdeeb813cf42c2c5", "8dc2d6ac7ee99a4a"),
    ("tq4", 16): ("c00c4dbfde98493a", "090e0e303d2d5a57"),
    ("tq4", 64): ("85b231635e058bbd", "77efa763c67db3dc"),
    ("tq4", 96): ("b20d8c155559e494", "634d5b7c3ee17017"),
    ("tq4", 128): ("01369dba615e285f", "a036d2b4e4ea163a"),
    ("tq4", 256): ("9d1eac24821e25fc", "84c5da6591faa95d"),
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
    assert [codec_by_name(name).id for name in names] == ["raw.1", "lm3.1", "tq3.1", "tq4.1"]
