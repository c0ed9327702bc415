"""Blobs of live KV: exact or within the codec, and refused if they are not the ones asked for."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.blobs.chain import CHUNK, STATE, WINDOW, Piece
from kvstore.blobs.format import HEADER_BYTES, pack
from kvstore.blobs.packer import RAW, Packer, StoreCodecs
from kvstore.blobs.state_tree import MatrixArray, StateArray
from kvstore.codecs.presets import codec_by_name
from kvstore.codecs.session_codec import SessionCodec
from kvstore.codecs.states import matrix_codec
from kvstore.errors import Corrupt, ForeignCodec, Mismatch, RefusedCodec, Unusable
from kvstore.ledger.repacking import packed_again
from kvstore.shapes import KVLayer, KVLayout, StoredModel
from tests.kv_sessions import CHUNK as SIZE
from tests.kv_sessions import LAYOUT, kv_of, state_at, tokens, trees_equal

TOKENS = tokens(SIZE)
RUN = kv_of(TOKENS)
WINDOWS = KVLayout("bfloat16", (KVLayer(1, 16, 16),))


def packer(codec="raw", layout=LAYOUT, fingerprint="f", windows=None) -> Packer:
    known = codec_by_name(codec) if isinstance(codec, str) else codec
    return Packer(known, StoredModel("m", fingerprint, layout, windows is not None, windows, 8))


def piece(kind: bytes = CHUNK, number: int = 1, first: int = 0, count: int = SIZE) -> Piece:
    return Piece(kind + bytes([number]) * 32, first, count)


def unpack(by: Packer, blob: bytes, asked: Piece | None = None):
    asked = asked or piece()
    out = by.layout_of(asked.key[:1]).empty(asked.num_tokens)
    by.unpack_rows(blob, asked, out)
    return out


def same(one, other) -> bool:
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(x[0], y[0]) and np.array_equal(x[1], y[1]) for x, y in pairs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_chunk_under_the_raw_codec_is_exact(dtype):
    layout = KVLayout(dtype, LAYOUT.layers)
    run, by = kv_of(TOKENS, layout), packer(layout=layout)
    blob = by.pack_rows(piece(first=32), run)
    assert len(blob) == by.rows_nbytes(32, SIZE)
    assert same(unpack(by, blob, piece(first=32)), run)
    assert not by.is_lossy(blob)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_chunk_under_a_lossy_codec_is_what_the_codec_makes_of_it(dtype):
    layout = KVLayout(dtype, (KVLayer(2, 64, 64),))
    run, by, asked = kv_of(TOKENS, layout), packer("tq3", layout), piece(first=32)
    blob = by.pack_rows(asked, run)
    assert len(blob) == by.rows_nbytes(32, SIZE) < HEADER_BYTES + SIZE * layout.elements_per_token
    wanted = layout.empty(SIZE)
    by.codec.decode(memoryview(by.codec.encode(run, layout, 32)), layout, 32, wanted)
    assert same(unpack(by, blob, asked), wanted)
    assert by.is_lossy(blob)


def test_rows_of_windows_have_a_layout_and_a_codec_of_their_own():
    how = SessionCodec(RAW, codec_by_name("tq4"), matrix_codec("state8"))
    by, asked = packer(StoreCodecs(RAW, how), windows=WINDOWS), piece(WINDOW, first=8, count=8)
    run = kv_of(TOKENS[:8], WINDOWS)
    blob = by.pack_rows(asked, run)
    assert by.is_lossy(blob) and len(blob) < HEADER_BYTES + 8 * WINDOWS.bytes_per_token
    assert unpack(by, blob, asked)[0][0].shape == (1, 8, 16)
    exact = packer(windows=WINDOWS)
    with pytest.raises(ForeignCodec):
        unpack(exact, blob, asked)
    assert same(unpack(by, exact.pack_rows(asked, run), asked), run)  # raw can always be read
    with pytest.raises(Mismatch):
        packer().verify(exact.pack_rows(asked, run), asked)


WIDER = KVLayout("bfloat16", (KVLayer(2, 16, 16), KVLayer(1, 16, 32)))
OTHER_PIECES = [{"number": 2}, {"first": SIZE}, {"count": SIZE - 1}]
OTHER_PACKERS = [{"fingerprint": "g"}, {"codec": "tq3"}, {"layout": WIDER}]
OTHER_PACKERS += [{"layout": KVLayout("float16", LAYOUT.layers)}]


@pytest.mark.parametrize(
    ("by", "asked"),
    [
        *((packer(), piece(**x)) for x in OTHER_PIECES),
        *((packer(**x), piece()) for x in OTHER_PACKERS),
    ],
)
def test_a_whole_chunk_of_something_else_is_a_mismatch(by, asked):
    blob = packer().pack_rows(piece(), RUN)
    with pytest.raises(Mismatch):
        unpack(by, blob, asked)
    with pytest.raises(Mismatch):
        by.verify(blob, asked)


def test_a_blob_of_another_kind_is_a_mismatch():
    state = packer().pack_state(piece(STATE, count=0), None)
    with pytest.raises(Mismatch):
        unpack(packer(), state, piece(STATE, count=0))
    with pytest.raises(Mismatch):
        packer().unpack_state(packer().pack_rows(piece(), RUN), piece())


@pytest.mark.parametrize("layout", [LAYOUT, KVLayout("float32", ())])
def test_a_state_comes_back_as_it_was(layout):
    by, state, asked = packer(layout=layout), state_at(TOKENS, 5), piece(STATE, first=32, count=0)
    blob = by.pack_state(asked, state)
    assert trees_equal(by.unpack_state(blob, asked), state)
    assert not by.is_lossy(blob)
    with pytest.raises(Mismatch):
        by.unpack_state(blob, piece(STATE, first=48, count=0))


def test_a_verified_blob_is_not_checked_again():
    raw = packer().pack_rows(piece(), RUN)
    verified = packer().verify(raw, piece())
    raw[-1] ^= 1  # as nothing can after the check; it shows who looks twice
    with pytest.raises(Corrupt):
        unpack(packer(), raw)
    unpack(packer(), verified)


def test_an_exact_state_can_be_packed_later_as_far_as_it_was_marked():
    layout = KVLayout("float32", (KVLayer(2, 32, 32),))
    how = SessionCodec(codec_by_name("tq3"), None, matrix_codec("state8"))
    by = packer(StoreCodecs(how.kv, how, readable=(RAW,)), layout)
    matrix = np.random.default_rng(1).standard_normal((1, 2, 32, 32)).astype(np.float32)
    conv = StateArray("float32", np.arange(6, dtype=np.float32))
    state, asked = [MatrixArray("float32", matrix), conv], piece(STATE, first=32, count=0)
    blob = packer(layout=layout).pack_state(asked, state)
    packed = packed_again(by, blob, asked)
    assert packed is not None and len(packed) < len(blob) / 2
    assert by.is_lossy(packed) and not by.is_lossy(blob)
    back = by.unpack_state(packed, asked)
    assert np.array_equal(back[1].array, conv.array)
    assert 0 < np.abs(back[0].array - matrix).max() < 0.05
    assert packed_again(by, packed, asked) is None
    with pytest.raises(ForeignCodec):
        packer(layout=layout).unpack_state(packed, asked)


@pytest.mark.parametrize("num_tokens", [SIZE + 1, 1 << 31])
@pytest.mark.parametrize("codec", ["raw", "tq3"])
def test_a_small_blob_cannot_ask_for_a_lot_of_memory(codec, num_tokens):
    """Before anything is allocated, its bytes are compared with what so many tokens need."""
    layout = KVLayout("bfloat16", (KVLayer(2, 64, 64),) * 2)
    by, asked = packer(codec, layout), piece(first=32)
    verified = by.verify(by.pack_rows(asked, kv_of(TOKENS, layout)), asked)
    claimed = pack(verified.header._replace(num_tokens=num_tokens), verified.payload)
    asked = asked._replace(num_tokens=num_tokens)
    with pytest.raises(Corrupt):
        by.verify(claimed, asked)
    other = packer(StoreCodecs(codec_by_name("tq4"), readable=(by.codec, RAW)), layout)
    with pytest.raises(Corrupt):
        packed_again(other, claimed, asked)


@pytest.mark.parametrize("codec", ["tq3", "tq4"])
def test_first_tokens_lie_apart_where_they_are_large(codec):
    layout = KVLayout("bfloat16", (KVLayer(4, 64, 64),) * 4)
    run, by = kv_of(TOKENS, layout), packer(codec, layout)
    blob = by.pack_rows(piece(), run)
    sinks = 4 * layout.elements_per_token * 2
    assert len(blob) < HEADER_BYTES + by.codec.packed_nbytes(layout, SIZE, 0) - sinks / 8
    assert len(blob) <= 1.1 * by.rows_nbytes(0, SIZE)  # an estimate
    out = unpack(by, blob)
    assert same([(k[:, :4], v[:, :4]) for k, v in out], [(k[:, :4], v[:, :4]) for k, v in run])
    for damaged in (blob[:-1], blob[: HEADER_BYTES + 50]):
        with pytest.raises(Unusable):
            unpack(by, damaged)


def test_adopting_changes_the_writer_and_keeps_what_can_be_read():
    layout = KVLayout("bfloat16", (KVLayer(2, 64, 64),))
    by, run = packer("tq3", layout), kv_of(TOKENS, layout)
    old = by.pack_rows(piece(), run)
    by.adopt(StoreCodecs(codec_by_name("tq4")), keep=True)
    assert by.readable == ("tq4.2", "tq3.2")
    unpack(by, old), unpack(by, by.pack_rows(piece(), run))
    by.adopt(StoreCodecs(RAW), keep=False)
    assert by.readable == ("raw.1",) and by.is_lossy(old)
    by.adopt(StoreCodecs(codec_by_name("tq3")), keep=True)
    by.adopt(StoreCodecs(codec_by_name("tq2")), keep=False)
    newer = by.pack_rows(piece(), run)
    by.adopt(StoreCodecs(RAW), keep=False)
    for blob in (old, newer):
        with pytest.raises(RefusedCodec):
            unpack(by, blob)
