"""Which codecs a configuration asks for, and the names of their blobs."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kvstore.blobs.chain import CHUNK, RECORD, TAIL
from kvstore.blobs.codec_set import TAG_BYTES, CodecSet, CodecTags, as_set, tag_of
from kvstore.blobs.format import Header, pack
from kvstore.codecs.base import RawCodec
from kvstore.codecs.presets import codec_by_name

RAW, TQ3, TQ4 = map(codec_by_name, ("raw", "tq3", "tq4"))


def ids(codecs):
    return [x.id for x in codecs]


def test_codecs_without_repetition():
    codecs = CodecSet(TQ3, TQ4, TQ4, (RAW, TQ3))
    assert ids(codecs.written) == ["tq3.2", "tq4.2"]
    assert ids(codecs.known) == ["tq3.2", "tq4.2", "raw.1"]
    assert ids(codecs.on(("disk", "redis"))) == ["tq4.2"]
    assert ids(as_set(RawCodec()).known) == ["raw.1"] and as_set(codecs) is codecs


def blob_in(codec: str) -> bytes:
    return pack(Header(CHUNK + bytes(32), codec.encode(), bytes(32), bytes(16), 0, 16), b"payload")


def test_a_blob_lies_under_the_mark_of_its_own_codec():
    marks = CodecTags.among("tq3.2", ["tq3.2", "raw.1"])
    key = CHUNK + bytes(range(32))
    assert marks.new(key, blob_in("tq3.2")) == marks.one(key) == key + tag_of("tq3.2")
    assert marks.new(key, blob_in("raw.1")) == key + tag_of("raw.1")
    assert marks.new(key, blob_in("rows16.1")) == marks.one(key)  # rows have no codec
    assert marks.all([key]) == [key + tag_of("tq3.2"), key + tag_of("raw.1")]
    assert marks.all([RECORD + bytes(32)]) == [RECORD + bytes(32)]
    assert CodecTags().all([key]) == [CodecTags().one(key)] == [key]


@given(
    st.lists(st.binary(min_size=32, max_size=32), min_size=1, unique=True),
    st.lists(st.text("abc.1-", min_size=1, max_size=24), min_size=1, max_size=5, unique=True),
    st.binary(max_size=200),
)
def test_no_two_blobs_have_one_name(digests, codec_ids, noise):
    marks = CodecTags.among(codec_ids[0], codec_ids)
    keys = [kind + x for x in digests for kind in (CHUNK, TAIL)]
    names = marks.all(keys)
    assert len(set(names)) == len(names) == len(keys) * len(codec_ids)
    assert all(len(x) == 33 + TAG_BYTES for x in names)
    assert marks.new(keys[0], noise) in marks.all(keys[:1])  # also for bytes that are no blob
