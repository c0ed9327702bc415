"""The names of blobs in a tier, for tests that bypass the store."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.blobs.chain import KEY_BYTES
from kvstore.blobs.codec_set import tag_of, tagged

RAW = "raw.1"


def named(key: bytes, codec_id: str = RAW) -> bytes:
    return tagged(key, tag_of(codec_id))


def all_named(keys: Sequence[bytes], codec_id: str = RAW) -> list[bytes]:
    return [named(key, codec_id) for key in keys]


def key_in(name: bytes) -> bytes:
    """The inverse, for any codec."""
    return name[:KEY_BYTES]
