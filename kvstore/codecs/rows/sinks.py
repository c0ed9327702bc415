"""The first tokens of a session inside a payload: 16-bit values with compressed exponents.

Every lossy codec keeps the first ``NUM_SINKS`` tokens unquantised. If a token has enough values,
the payload of a session's first chunk begins with these tokens, in a denser form of the same 16
bits, and then has the codec's own payload of the tokens after them:

    u32 length of the first part | first tokens (``ThinRows``) | payload of the other tokens

Unsqueezed, the four tokens take a seventh of a session of 300 tokens at a bit and a half.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from kvstore.codecs.base import NUM_SINKS, ChunksCodec, Codec, Payload, decode_each
from kvstore.codecs.floats import from_stored, to_stored
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, KVRun, slice_tokens, tokens_in

_COUNT: Final = struct.Struct("<I")
WORTH_SQUEEZING: Final = 1024  # the least values per token for which squeezing saves bytes


def squeezes(layout: KVLayout, first_token: int, num_tokens: int, codec: Codec) -> bool:
    """Return whether a payload of these tokens begins with squeezed first tokens."""
    return (
        first_token == 0
        and num_tokens > NUM_SINKS
        and not codec.exact
        and layout.elements_per_token >= WORTH_SQUEEZING
    )


def encode(codec: Codec, run: KVRun, layout: KVLayout, first_token: int) -> Payload:
    """Pack a run of tokens as ``Codec.encode`` does, first tokens squeezed."""
    count = tokens_in(run)
    if not squeezes(layout, first_token, count, codec):
        return codec.encode(run, layout, first_token)
    thin = ThinRows(layout).encode(slice_tokens(run, 0, NUM_SINKS))
    return join(thin, codec.encode(slice_tokens(run, NUM_SINKS, count), layout, NUM_SINKS))


def decode(
    codec: Codec, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun
) -> None:
    """Unpack what ``encode`` packed into ``out``, views of all its tokens. Raises ``Corrupt``."""
    count = tokens_in(out)
    if len(payload) < least_nbytes(codec, layout, count, first_token):
        raise Corrupt("a payload is too short for its tokens")
    if not squeezes(layout, first_token, count, codec):
        codec.decode(payload, layout, first_token, out)
        return
    thin, rest = split(payload)
    if len(rest) < codec.least_nbytes(layout, count - NUM_SINKS, NUM_SINKS):
        raise Corrupt("a payload is too short for its tokens")
    ThinRows(layout).decode(thin, NUM_SINKS, slice_tokens(out, 0, NUM_SINKS))
    codec.decode(rest, layout, NUM_SINKS, slice_tokens(out, NUM_SINKS, count))


def decode_chunks(
    codec: Codec, payloads: Sequence[memoryview], layout: KVLayout, first_token: int, out: KVRun
) -> None:
    """Unpack consecutive chunks with the same number of tokens into ``out``. Raises ``Corrupt``."""
    count, size = tokens_in(out), tokens_in(out) // len(payloads)
    if len(payloads) == 1 or first_token < NUM_SINKS:
        decode(codec, payloads[0], layout, first_token, slice_tokens(out, 0, size))
        if len(payloads) > 1:
            rest = slice_tokens(out, size, count)
            decode_chunks(codec, payloads[1:], layout, first_token + size, rest)
        return
    if min(map(len, payloads)) < codec.least_nbytes(layout, size, first_token):
        raise Corrupt("a payload is too short for its tokens")
    unpack = codec.decode_chunks if isinstance(codec, ChunksCodec) else partial(decode_each, codec)
    unpack(payloads, layout, first_token, out)


def packed_nbytes(codec: Codec, layout: KVLayout, num_tokens: int, first_token: int) -> int:
    """Return the length of a payload in bytes; an estimate, as ``Codec.packed_nbytes``."""
    if not squeezes(layout, first_token, num_tokens, codec):
        return codec.packed_nbytes(layout, num_tokens, first_token)
    # Squeezed first tokens take about 11.2 bits for a value (measured on several models).
    thin = _COUNT.size + NUM_SINKS * layout.elements_per_token * 45 // 32
    return _COUNT.size + thin + codec.packed_nbytes(layout, num_tokens - NUM_SINKS, NUM_SINKS)


def least_nbytes(codec: Codec, layout: KVLayout, num_tokens: int, first_token: int) -> int:
    """Return a lower bound of the length of any payload of ``num_tokens`` tokens, in bytes."""
    if not squeezes(layout, first_token, num_tokens, codec):
        return codec.least_nbytes(layout, num_tokens, first_token)
    thin = NUM_SINKS * layout.elements_per_token
    return _COUNT.size + thin + codec.least_nbytes(layout, num_tokens - NUM_SINKS, NUM_SINKS)


def join(thin: bytes, rest: Payload) -> bytes:
    """Return the payload of a session's first chunk from its two parts."""
    return b"".join((_COUNT.pack(len(thin)), thin, rest))


def split(payload: memoryview) -> tuple[memoryview, memoryview]:
    """Return the two parts that ``join`` wrote, as views. Raises ``Corrupt``."""
    if len(payload) < _COUNT.size:
        raise Corrupt("a first chunk is too short")
    end = _COUNT.size + _COUNT.unpack_from(payload)[0]
    if end > len(payload):
        raise Corrupt("the first tokens are longer than the chunk that holds them")
    return payload[_COUNT.size : end], payload[end:]


class ThinRows:
    """Packs 16-bit values with Huffman-coded exponents; all 16 bits are restored exactly.

    u32 number of values | for each value a byte of mantissa and sign | the other bytes, deflated

    The values are K then V of each layer, each (num_kv_heads, num_tokens, dim) in C order; those
    of an fp32 cache are rounded to bf16, the precision that codecs work in anyway.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def encode(self, run: KVRun) -> bytes:
        stored = np.concatenate(
            [to_stored(x, self._layout.dtype).reshape(-1) for pair in run for x in pair]
        )
        turned = stored << np.uint16(1) | stored >> np.uint16(15)  # the sign goes to the mantissa
        packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        high = packer.compress((turned >> np.uint16(8)).astype(np.uint8).tobytes())
        low = (turned & np.uint16(0xFF)).astype(np.uint8).tobytes()
        return b"".join([_COUNT.pack(len(stored)), low, high, packer.flush()])

    def decode(self, payload: memoryview, num_tokens: int, out: KVRun) -> None:
        """Fill ``out`` with a payload of ``num_tokens`` tokens. Raises ``Corrupt``."""
        count = num_tokens * self._layout.elements_per_token
        begin = _COUNT.size + count
        if len(payload) < begin or _COUNT.unpack_from(payload) != (count,):
            raise Corrupt(f"{len(payload)} bytes are not {num_tokens} thin tokens")
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            high = unpacker.decompress(payload[begin:], count + 1)
        except zlib.error as error:
            raise Corrupt(f"the exponents of thin tokens: {error}") from error
        if len(high) != count or not unpacker.eof or unpacker.unused_data:
            raise Corrupt(f"{len(high)} exponents of {count} values")
        turned = np.frombuffer(high, np.uint8).astype("<u2") << np.uint16(8)
        turned |= np.frombuffer(payload, np.uint8, count, _COUNT.size)
        stored, at = turned >> np.uint16(1) | turned << np.uint16(15), 0
        for array in (x for pair in out for x in pair):
            size = array.shape[0] * num_tokens * array.shape[2]
            rows = stored[at : at + size].reshape(array.shape[0], num_tokens, array.shape[2])
            array[...] = from_stored(rows, self._layout.dtype)
            at += size
