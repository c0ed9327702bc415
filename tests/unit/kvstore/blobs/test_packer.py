from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from kvstore.blobs.chain import CHUNK, SNAPSHOT, TAIL
from kvstore.blobs.codec_set import CodecSet
from kvstore.blobs.format import HEADER_BYTES, pack, parse, verify
from kvstore.blobs.packer import Packer
from kvstore.blobs.segments import FRESH, Lineage, Segment, join
from kvstore.blobs.state_tree import MatrixArray, StateArray
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import matrix_codec
from kvstore.errors import Corrupt, Mismatch, Unusable
from kvstore.ledger.repacking import packed_again
from kvstore.shapes import KVLayer, KVLayout, slice_tokens
from tests.kv_sessions import CHUNK as SIZE
from tests.kv_sessions import LAYOUT, kv_of, state_at, tokens, trees_equal

TOKENS = tokens(SIZE)
RUN = kv_of(TOKENS)


def packer(codec="raw", layout=LAYOUT, fingerprint="f") -> Packer:
    return Packer(codec_by_name(codec), layout, fingerprint)


def key(kind: bytes, number: int = 1) -> bytes:
    return kind + bytes([number]) * 32


def unpack(by: Packer, blob: bytes, *, name=None, first=0, take=SIZE):
    out = by.layout.empty(take)
    by.unpack_run(blob, name or key(CHUNK), first, SIZE, out)
    return out


def test_a_chunk_comes_back_whole_or_in_part():
    blob = packer().pack_run(key(CHUNK), RUN, 0)
    assert len(blob) == packer().run_nbytes(0, SIZE)
    for take in (1, 7, SIZE):
        out = unpack(packer(), blob, take=take)
        for got, want in zip(out, slice_tokens(RUN, 0, take), strict=True):
            assert all(map(np.array_equal, got, want))


def test_a_thousand_changed_bytes_are_a_thousand_misses():
    blob = packer().pack_run(key(CHUNK), RUN, 0)
    choose = random.Random(1)
    places = [*range(HEADER_BYTES), *(choose.randrange(len(blob)) for _ in range(1000))]
    for at in places:
        bad = bytearray(blob)
        bad[at] ^= 1 << choose.randrange(8)
        with pytest.raises(Unusable):
            unpack(packer(), bad)


def test_every_cut_is_a_miss():
    blob = packer().pack_run(key(CHUNK), RUN, 0)
    for length in (*range(0, len(blob), 61), len(blob) - 1):
        with pytest.raises(Corrupt):
            unpack(packer(), blob[:length])


@pytest.mark.parametrize(
    ("by", "asked"),
    [
        (packer(), {"name": key(CHUNK, 2)}),
        (packer(), {"first": SIZE}),
        (packer(fingerprint="g"), {}),
        (packer(codec="tq3"), {}),
        (packer(layout=KVLayout("bfloat16", (KVLayer(2, 16, 16), KVLayer(1, 16, 32)))), {}),
        (packer(layout=KVLayout("float16", LAYOUT.layers)), {}),
    ],
)
def test_a_whole_chunk_of_something_else_is_a_mismatch(by, asked):
    blob = packer().pack_run(key(CHUNK), RUN, 0)
    with pytest.raises(Mismatch):
        unpack(by, blob, **asked)


def test_a_blob_of_another_kind_is_a_mismatch():
    state = packer().pack_snapshot(key(SNAPSHOT), None, RUN, 0, SIZE)
    with pytest.raises(Mismatch):
        unpack(packer(), state, name=key(SNAPSHOT))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_tail_under_the_raw_codec_is_exact(dtype):
    layout = KVLayout(dtype, LAYOUT.layers)
    run, by = kv_of(TOKENS[:9], layout), packer(layout=layout)
    blob = by.pack_run(key(TAIL), run, 32)
    assert len(blob) == by.run_nbytes(32, 9)
    for take in (1, 9):
        out = layout.empty(take)
        by.unpack_run(blob, key(TAIL), 32, 9, out)
        for got, want in zip(out, slice_tokens(run, 0, take), strict=True):
            assert all(map(np.array_equal, got, want))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_tail_under_a_lossy_codec_is_packed_like_a_chunk(dtype):
    layout = KVLayout(dtype, (KVLayer(2, 64, 64),))
    run, by = kv_of(TOKENS[:9], layout), packer("tq3", layout)
    blob = by.pack_run(key(TAIL), run, 32)
    assert len(blob) == by.run_nbytes(32, 9) < HEADER_BYTES + 9 * layout.elements_per_token
    out, wanted = layout.empty(9), layout.empty(9)
    by.unpack_run(blob, key(TAIL), 32, 9, out)
    by.codec.decode(memoryview(by.codec.encode(run, layout, 32)), layout, 32, wanted)
    assert all(map(np.array_equal, out[0], wanted[0]))


def test_a_snapshot_carries_the_tokens_after_the_last_chunk():
    run, state = kv_of(TOKENS[:5]), state_at(TOKENS, 5)
    blob = packer().pack_snapshot(key(SNAPSHOT), state, run, 32, 5)
    out = LAYOUT.empty(5)
    back = packer().unpack_snapshot(blob, key(SNAPSHOT), 32, 5, out)
    assert trees_equal(back, state)
    assert all(map(np.array_equal, out[1], run[1]))
    with pytest.raises(Mismatch):
        packer().unpack_snapshot(blob, key(SNAPSHOT), 32, 4, LAYOUT.empty(4))


def test_a_model_without_growing_layers_has_snapshots_all_the_same():
    layout = KVLayout("float32", ())
    by, state = packer(layout=layout), state_at(TOKENS, 5)
    blob = by.pack_snapshot(key(SNAPSHOT), state, [], 0, 5)
    assert trees_equal(by.unpack_snapshot(blob, key(SNAPSHOT), 0, 5, []), state)


def test_a_verified_blob_is_not_checked_again():
    raw = bytearray(packer().pack_run(key(CHUNK), RUN, 0))
    verified = verify(raw, key(CHUNK))
    raw[-1] ^= 1  # as nothing can after the check; it shows who looks twice
    with pytest.raises(Corrupt):
        packer().unpack_run(raw, key(CHUNK), 0, SIZE, LAYOUT.empty(SIZE))
    packer().unpack_run(verified, key(CHUNK), 0, SIZE, LAYOUT.empty(SIZE))


def test_a_blob_under_another_name_is_not_verified():
    blob = packer().pack_run(key(CHUNK), RUN, 0)
    with pytest.raises(Mismatch):
        verify(blob, key(CHUNK, 2))


def test_an_exact_state_can_be_packed_later_as_far_as_it_was_marked():
    """A state that came from a lossy copy, and was kept exactly since, cannot."""
    layout = KVLayout("float32", (KVLayer(2, 32, 32),))
    how = SessionCodec(codec_by_name("tq3"), None, matrix_codec("state8"))
    codecs = CodecSet.one(how.kv, (codec_by_name("raw"),))
    by = Packer(replace(codecs, sessions={how.kv.id: how}), layout, "f")
    matrix = np.random.default_rng(1).standard_normal((1, 2, 32, 32)).astype(np.float32)
    conv = StateArray("float32", np.arange(6, dtype=np.float32))
    state, run, name = (
        [MatrixArray("float32", matrix), conv],
        kv_of(TOKENS[:5], layout),
        key(SNAPSHOT),
    )
    raw = Packer(codec_by_name("raw"), layout, "f")
    blob = raw.pack_snapshot(name, state, run, 32, 5)
    packed = packed_again(by, blob, name, how.kv)
    assert packed is not None and len(packed) < len(blob) / 2
    assert by.has_lossy_state(packed) and by.is_lossy(packed)
    back = by.unpack_snapshot(packed, name, 32, 5, layout.empty(5))
    assert np.array_equal(back[1].array, conv.array)
    assert 0 < np.abs(back[0].array - matrix).max() < 0.05
    assert packed_again(by, packed, name, how.kv) is None
    woken = raw.pack_snapshot(name, state, run, 32, 5, lineage=Lineage(20))
    assert packed_again(by, woken, name, how.kv) is None


def test_rows_that_an_edit_dropped_are_not_taken_over_with_their_segment():
    by, first = packer("tq3"), 32

    def packed(run, number, lineage=FRESH):
        blob, taken = by.pack_run(key(TAIL, number), run, first, None, lineage), run[0][0].shape[1]
        out = LAYOUT.empty(taken)
        by.unpack_run(blob, key(TAIL, number), first, taken, out)
        return out, by.lossy_segments(blob, key(TAIL, number), first, taken)

    def extended(run, start, end):
        fresh = slice_tokens(kv_of(tokens(60)), start, end)
        both = zip(run, fresh, strict=True)
        return [tuple(map(lambda *x: np.concatenate(x, 1), *pairs)) for pairs in both]

    run, segments = packed(kv_of(tokens(20)), 1)
    edited = extended(slice_tokens(run, 0, 12), 40, 50)
    run, segments = packed(edited, 2, Lineage(first + 12, segments, first + 12))
    assert [(x.first, x.num_tokens, x.end) for x in segments] == [(32, 20, 44), (44, 10, 54)]
    again, segments = packed(extended(run, 50, 56), 3, Lineage(first + 22, segments))
    assert [x.first for x in segments] == [32, 44, 54]
    for got, want in zip(slice_tokens(again, 0, 22), run, strict=True):
        assert all(map(np.array_equal, got, want))


def test_a_small_blob_cannot_ask_for_a_lot_of_memory_to_be_packed():
    by = packer("raw")
    verified = verify(by.pack_run(key(TAIL), kv_of(TOKENS), 32), key(TAIL))
    for num_tokens in (SIZE + 1, 1 << 31):
        claimed = replace(verified.header, num_tokens=num_tokens)
        with pytest.raises(Corrupt):
            packed_again(by, pack(claimed, verified.payload), key(TAIL), codec_by_name("tq3"))


def test_segments_in_an_unknown_codec_are_not_taken_over():
    blob = packer("tq4").pack_run(key(TAIL), kv_of(TOKENS), 32)
    with pytest.raises(Unusable):
        packer("tq3").lossy_segments(blob, key(TAIL), 32, SIZE)


def test_first_tokens_lie_apart_where_they_are_large():
    layout = KVLayout("bfloat16", (KVLayer(4, 64, 64),) * 4)
    run = kv_of(TOKENS, layout)
    by = packer("tq3", layout)
    blob = by.pack_run(key(CHUNK), run, 0)
    sinks = 4 * layout.elements_per_token * 2
    assert by.run_nbytes(0, SIZE) - sinks / 2 < len(blob) < by.run_nbytes(0, SIZE) - sinks / 8
    for take in (2, 7, SIZE):
        out = layout.empty(take)
        by.unpack_run(blob, key(CHUNK), 0, SIZE, out)
        first = min(take, 4)
        assert np.array_equal(out[0][0][:, :first], run[0][0][:, :first])
    for damaged in (blob[:-1], blob[: HEADER_BYTES + 50]):
        with pytest.raises(Unusable):
            by.unpack_run(damaged, key(CHUNK), 0, SIZE, layout.empty(SIZE))


WIDE = KVLayout("bfloat16", (KVLayer(2, 64, 64), KVLayer(2, 64, 64)))


@pytest.mark.parametrize("times", [4.1, 500.0], ids=["a little more", "as few bits as none has"])
@pytest.mark.parametrize("codec_id", ["raw", "tq3", "tq4", "rows16.1", "thin16.1"])
def test_a_segment_has_no_more_tokens_than_its_codec_could_pack(codec_id: str, times: float):
    """Only a few are asked for; to get at these all that it claims would be unpacked."""
    codecs = CodecSet(codec_by_name("raw"), *(codec_by_name(x) for x in ("tq3", "tq4")))
    by = Packer(codecs, WIDE, "f")
    named = {x.split(".")[0]: x for x in by.readable}.get(codec_id, codec_id)
    payload = memoryview(bytes(1 << 20))
    claimed = int(times * 8 * len(payload) / WIDE.elements_per_token / 16)
    if codec_id.startswith("tq"):
        claimed = int(claimed * 16 / 3)
    segment = Segment(0, claimed, named, payload)
    own = key(TAIL)
    header = parse(by.pack_run(own, kv_of(TOKENS, WIDE), 0))[0]
    blob = pack(replace(header, codec=b"segments.1"), join([segment], 0))
    out = WIDE.empty(SIZE)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="too short for its tokens"):
            by.unpack_run(blob, own, 0, SIZE, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["raw", "rows.1"])
def test_nor_has_a_blob_that_is_to_be_packed_again(name: str):
    by, own = Packer(codec_by_name("raw"), WIDE, "f"), key(TAIL)
    header, payload = parse(by.pack_run(own, kv_of(TOKENS, WIDE), 0))
    codec = name if name == "rows.1" else by.codec.id
    blob = pack(replace(header, codec=codec.encode(), num_tokens=100 * SIZE), payload)
    with pytest.raises(Corrupt, match="too short for its tokens"):
        packed_again(by, blob, own, codec_by_name("tq3"))
