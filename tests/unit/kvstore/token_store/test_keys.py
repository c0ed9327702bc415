"""A record of a chain of tokens lies in a tier as a blob that is bound to its key."""

from __future__ import annotations

import pytest

from kvstore.blobs.chain import KeySpace
from kvstore.blobs.packer import Packer
from kvstore.codecs.presets import codec_by_name
from kvstore.errors import Mismatch, Unusable
from kvstore.store.token_keys import TokenKeys, TokenRecords
from tests.kv_sessions import CHUNK, LAYOUT, kv_of, tokens
from tests.unit.kvstore.token_store.test_records import RECORD


def records(fingerprint: str) -> tuple[TokenRecords, Packer]:
    packer = Packer(codec_by_name("raw"), LAYOUT, fingerprint)
    space = KeySpace(fingerprint, CHUNK, "model")
    return TokenRecords(TokenKeys(space, growing=True, needs_state=False), packer), packer


def test_a_record_is_bound_to_its_key():
    ours, packer = records("f1")
    later, _ = records("later")
    key = ours.key(RECORD.tenant, RECORD.id)
    blob = ours.pack(RECORD)
    assert ours.unpack(key, blob) == later.unpack(key, blob) == RECORD
    with pytest.raises(Mismatch):
        ours.unpack(ours.key("t", "another"), blob)
    chunk = b"c" + key[1:]
    with pytest.raises(Unusable):
        ours.unpack(chunk, packer.pack_run(chunk, kv_of(tokens(CHUNK)), 0))


def test_only_sessions_of_this_model_and_a_known_codec_are_usable():
    ours, _ = records("f")
    assert not ours.is_usable(RECORD)  # it is in tq3
    raw = type(RECORD)(**{x: getattr(RECORD, x) for x in RECORD.__struct_fields__} | RAW)
    assert ours.is_usable(raw)
    assert not records("another")[0].is_usable(raw)


RAW = {"codecs": ("raw.1",)}
