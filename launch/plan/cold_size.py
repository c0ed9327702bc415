"""The bytes of a sleeping session in a tier, as the cold store's own packer counts them."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.blobs.chain import KEY_BYTES
from kvstore.blobs.codec_set import TAG_BYTES
from kvstore.blobs.format import HEADER_BYTES
from kvstore.blobs.packer import Packer
from kvstore.chunk_size import chunk_tokens
from kvstore.codecs.base import Codec
from kvstore.codecs.session_codec import SessionCodec
from kvstore.config import StoreConfig
from kvstore.errors import UnknownCodec
from kvstore.shapes import NUMPY_DTYPES, DType, KVLayout
from kvstore.tiers.ram_tier import ENTRY_BYTES
from launch.families.cache_shape import CacheShape

TOKEN_ID_BYTES = 4
RECORD_BYTES = 256  # of a session record besides its token ids: names, digests, numbers
PLACE_BYTES = KEY_BYTES + TAG_BYTES + ENTRY_BYTES  # of a blob in a tier, besides its own


@dataclass(frozen=True)
class ColdSize:
    """The bytes that one sleeping session takes in a tier; keys and index entries included.

    ``rows`` are K and V of every token: packed chunks, and the tail, which lies inside the
    states where there are some. ``states`` are packed by a codec of whole sessions only.
    """

    rows: int
    states: int
    record: int
    row_bytes_per_token: float  # of a full chunk after the first, headers not counted

    @property
    def total(self) -> int:
        return self.rows + self.states + self.record


def cold_size(
    shape: CacheShape,
    codec: Codec | SessionCodec,
    dtype: DType,
    num_tokens: int,
    store: StoreConfig,
) -> ColdSize:
    """The bytes of a session of ``num_tokens``: headers, exact first tokens, tail, states, record.

    Raises:
        UnknownCodec: this codec must not or cannot pack this cache.
    """
    if shape.exact_only and not codec.exact:
        raise UnknownCodec(f"codec {codec.id} is refused: {shape.exact_only}")
    layout = KVLayout(dtype, shape.growing)
    session = codec if isinstance(codec, SessionCodec) else None
    codec = codec.kv if isinstance(codec, SessionCodec) else codec
    codec.check(layout)
    packer, size = Packer(codec, layout, ""), chunk_tokens(store)
    num_chunks, tail = divmod(num_tokens, size) if shape.growing else (0, 0)
    rows = [packer.run_nbytes(min(i, 1) * size, size) for i in range(num_chunks)]
    tail_bytes = packer.run_nbytes(num_chunks * size, tail) if tail else 0
    states: list[int] = []
    if shape.needs_state:
        state = HEADER_BYTES + (
            shape.state_bytes(num_tokens, NUMPY_DTYPES[dtype].itemsize)
            if session is None
            else shape.packed_state_bytes(session, dtype, num_tokens)
        )
        states = [state + max(tail_bytes - HEADER_BYTES, 0)] * store.max_snapshots
    elif tail:
        rows.append(tail_bytes)
    packed = codec.packed_nbytes(layout, size, size) if shape.growing else 0
    return ColdSize(
        rows=sum(rows) + len(rows) * PLACE_BYTES,
        states=sum(states) + len(states) * PLACE_BYTES,
        record=HEADER_BYTES + RECORD_BYTES + TOKEN_ID_BYTES * num_tokens + PLACE_BYTES,
        row_bytes_per_token=packed / size,
    )
