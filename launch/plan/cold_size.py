"""The bytes of a sleeping session in a tier, as the cold store's own packer counts them."""

from __future__ import annotations

from kvstore.blobs.chain import KEY_BYTES
from kvstore.blobs.codec_tags import TAG_BYTES
from kvstore.blobs.format import HEADER_BYTES
from kvstore.blobs.packer import Packer
from kvstore.chunk_size import chunk_tokens
from kvstore.codecs.base import Codec
from kvstore.config import StoreConfig
from kvstore.errors import UnknownCodec
from kvstore.shapes import NUMPY_DTYPES, DType, KVLayout
from kvstore.tiers.ram_tier import ENTRY_BYTES
from launch.plan.cache_shape import CacheShape

TOKEN_ID_BYTES = 4
RECORD_BYTES = 256  # of a session record besides its token ids: names, digests, numbers


def cold_bytes(
    shape: CacheShape, codec: Codec, dtype: DType, num_tokens: int, store: StoreConfig
) -> int:
    """All bytes that one sleeping session takes in a tier.

    That includes headers, exact first tokens, the raw tail, the record, keys and index entries.

    Raises:
        UnknownCodec: this codec must not or cannot pack this cache.
    """
    if shape.exact_only and not codec.exact:
        raise UnknownCodec(f"codec {codec.id} is refused: {shape.exact_only}")
    layout = KVLayout(dtype, shape.growing)
    codec.check(layout)
    packer = Packer(codec, layout, "")
    size = chunk_tokens(store)
    num_chunks, tail = divmod(num_tokens, size)
    blobs = [
        packer.chunk_nbytes(min(i, 1) * size, size)
        for i in range(num_chunks if shape.growing else 0)
    ]
    if shape.needs_state:  # the newest rows then lie inside the snapshots
        state = shape.state_bytes(num_tokens, NUMPY_DTYPES[dtype].itemsize)
        blobs += [packer.tail_nbytes(tail) + state] * store.max_snapshots
    elif tail:
        blobs.append(packer.tail_nbytes(tail))
    blobs.append(HEADER_BYTES + RECORD_BYTES + TOKEN_ID_BYTES * num_tokens)
    return sum(blobs) + len(blobs) * (KEY_BYTES + TAG_BYTES + ENTRY_BYTES)
