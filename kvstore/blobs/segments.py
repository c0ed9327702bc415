"""The rows of a run of tokens in segments, each packed by itself or stored whole.

Under an exact codec rows keep the engine's dtype bit for bit. Rows that came from a lossy copy
which is gone keep 16 bits per value (an fp32 cache is rounded to bf16), the precision that codecs
work in anyway; so do tails written by older releases. The first tokens of a session are kept in 16
bits under every codec, and their exponents, which repeat, are squeezed. Unsqueezed, these tokens
take a seventh of a session of 300 tokens at a bit and a half.

A session that was restored from a lossy copy and continued has two kinds of rows in one chunk, tail
or part: restored rows, and rows that were computed since. The packed bytes of restored rows are
taken over as they are, from the blob that they came from; only the other rows are packed. So no row
goes through a lossy codec twice, however often a session sleeps, and no row has to be stored
unpacked.

    u32 number of segments | for each: u32 first token, counted from that of the run; u32 tokens
    packed in it; u64 length; 24 bytes codec id | the payloads

A segment covers the tokens up to the first one of the next segment. It may have been packed with
more tokens: the later ones were dropped when a history was edited.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from kvstore.codecs.base import NUM_SINKS, Codec
from kvstore.codecs.floats import from_stored, to_stored
from kvstore.errors import Corrupt
from kvstore.shapes import KVLayout, KVRun, slice_tokens

_COUNT: Final = struct.Struct("<I")
CODEC_ID: Final = "segments.1"  # in the header of a blob whose payload is made of segments
WORTH_SQUEEZING: Final = 1024  # values of a token; fewer are not worth a segment
_ENTRY: Final = struct.Struct("<IIQ24s")


class WholeRows:
    """Rows as they are: for each layer K then V, each (num_kv_heads, num_tokens, dim) in C order.

    ``restored``: some of them came from a lossy copy, and must not be packed again.
    """

    def __init__(self, layout: KVLayout, exact: bool, restored: bool = False) -> None:
        self._layout = layout
        self.exact = exact
        self.restored = restored
        self.codec_id = ("restored" if restored else "rows") + (".1" if exact else "16.1")

    def nbytes(self, num_tokens: int) -> int:
        itemsize = self._layout.numpy_dtype.itemsize if self.exact else 2
        return num_tokens * self._layout.elements_per_token * itemsize

    def least_nbytes(self, num_tokens: int) -> int:
        """Return the fewest bytes that this number of tokens may take."""
        return self.nbytes(num_tokens)

    def encode(self, run: KVRun) -> bytes:
        return b"".join(self._stored(x).tobytes() for pair in run for x in pair)

    def decode(self, payload: memoryview, num_tokens: int, out: KVRun) -> None:
        """Fill ``out`` with the first tokens of a payload of ``num_tokens`` tokens.

        Raises:
            Corrupt: the payload does not have the length of that many tokens.
        """
        if len(payload) != self.nbytes(num_tokens):
            raise Corrupt(f"{len(payload)} bytes are not {num_tokens} tokens as they are")
        dtype = self._layout.numpy_dtype if self.exact else np.dtype(np.uint16)
        at = 0
        for array in (x for pair in out for x in pair):
            heads, taken, dim = array.shape
            count = heads * num_tokens * dim
            rows = np.frombuffer(payload, dtype, count, at).reshape(heads, num_tokens, dim)
            array[...] = self._restored(rows[:, :taken])
            at += count * dtype.itemsize

    def _stored(self, array: np.ndarray) -> np.ndarray:
        return array if self.exact else to_stored(array, self._layout.dtype)

    def _restored(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.exact else from_stored(rows, self._layout.dtype)


class ThinRows:
    """Rows in 16 bits whose exponents are Huffman-coded; all 16 bits are restored exactly.

    u32 number of values | for each value a byte of mantissa and sign | the other bytes, deflated
    """

    codec_id: Final = "thin16.1"
    exact: Final = False
    restored: Final = False

    def __init__(self, layout: KVLayout) -> None:
        self._rows = WholeRows(layout, exact=False)

    def least_nbytes(self, num_tokens: int) -> int:
        """Return the fewest bytes: half of the bytes are stored uncompressed."""
        return self._rows.nbytes(num_tokens) // 2

    def encode(self, run: KVRun) -> bytes:
        stored = np.frombuffer(self._rows.encode(run), "<u2")
        turned = stored << np.uint16(1) | stored >> np.uint16(15)  # the sign goes to the mantissa
        packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
        high = packer.compress((turned >> np.uint16(8)).astype(np.uint8).tobytes())
        low = (turned & np.uint16(0xFF)).astype(np.uint8).tobytes()
        return b"".join([_COUNT.pack(len(stored)), low, high, packer.flush()])

    def decode(self, payload: memoryview, num_tokens: int, out: KVRun) -> None:
        """Fill ``out`` with the first tokens; see ``WholeRows.decode``."""
        count = self._rows.nbytes(num_tokens) // 2
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
        stored = turned >> np.uint16(1) | turned << np.uint16(15)
        self._rows.decode(stored.data.cast("B"), num_tokens, out)


class Segment(NamedTuple):
    """Packed rows of the tokens ``first ..`` of a session, in all layers of a layout.

    ``until``: the rows from this token on were dropped; None = all are in use.
    """

    first: int
    num_tokens: int
    codec_id: str
    payload: memoryview
    until: int | None = None

    @property
    def packed_end(self) -> int:
        """The end of the tokens packed in it: the index after the last one."""
        return self.first + self.num_tokens

    @property
    def end(self) -> int:
        """The end of its tokens in use: the index after the last one."""
        return self.packed_end if self.until is None else self.until

    def cut(self, end: int) -> Segment:
        """Drop the rows from token ``end`` on."""
        return self._replace(until=end) if end < self.end else self


# Unpacks all tokens of a segment into a run of that length.
Unpack: TypeAlias = Callable[[Segment, KVRun], None]
# Returns the fewest bytes that the tokens of a segment may take.
Least: TypeAlias = Callable[[Segment], int]


@dataclass(frozen=True)
class Lineage:
    """Describes the lossy copies from which rows or a state that are to be packed were restored.

    ``position``: no token from this one on was restored from a lossy copy; 0 = no token was.
    ``segments``: those of that copy and later ones, as far as they still exist. ``shared_end``: the
    tokens of the stored segments from this one on differ, since the history was edited; None = none
    differ.
    """

    position: int = 0
    segments: Sequence[Segment] = ()
    shared_end: int | None = None


FRESH: Final = Lineage()


def squeezes(layout: KVLayout, first_token: int) -> bool:
    """True if a run has first tokens of a session, and they are large enough for a segment."""
    return first_token < NUM_SINKS and layout.elements_per_token >= WORTH_SQUEEZING


def is_first_chunk(segments: Sequence[Segment], codec_id: str, num_tokens: int) -> bool:
    """Say whether a session's first chunk of ``num_tokens`` was packed at once by this codec."""
    places = [(x.first, x.num_tokens, x.codec_id) for x in segments]
    rest = (NUM_SINKS, num_tokens - NUM_SINKS, codec_id)
    return places == [(0, NUM_SINKS, ThinRows.codec_id), rest]


def overhead_bytes(num_segments: int) -> int:
    """Return the bytes of a payload besides those of its segments."""
    return _COUNT.size + num_segments * _ENTRY.size


def pack(
    run: KVRun, layout: KVLayout, first_token: int, codec: Codec, lineage: Lineage
) -> list[Segment]:
    """Take over the rows that came from lossy copies, as far as they exist, and pack the rest.

    The first tokens of a session, which every codec keeps in 16 bits, get a segment of their own.

    Args:
        run: the rows of the tokens from ``first_token`` on.
        codec: of the rows that were computed since. Restored rows whose packed bytes are gone are
            kept in 16 bits.
    """
    end = first_token + run[0][0].shape[1]
    lossy_end, at = min(lineage.position, end), first_token
    kept, found = WholeRows(layout, exact=False, restored=True), list[Segment]()
    own = [x for x in lineage.segments if x.first >= first_token]
    taken_end = lossy_end if lineage.shared_end is None else min(lossy_end, lineage.shared_end)
    for segment in cover(own, first_token, taken_end):
        stop = min(segment.end, taken_end)
        if stop < segment.packed_end and len(segment.payload) > kept.nbytes(stop - at):
            break  # most of it is unused by now: the rows themselves are smaller
        found.append(segment.cut(stop))
        at = stop
    if at < lossy_end:
        rows = kept.encode(slice_tokens(run, at - first_token, lossy_end - first_token))
        found.append(Segment(at, lossy_end - at, kept.codec_id, memoryview(rows)))
        at = lossy_end
    if at < min(NUM_SINKS, end) and squeezes(layout, first_token):
        until, thin = min(NUM_SINKS, end), ThinRows(layout)
        first = thin.encode(slice_tokens(run, at - first_token, until - first_token))
        found.append(Segment(at, until - at, thin.codec_id, memoryview(first)))
        at = until
    if at < end:
        fresh = codec.encode(slice_tokens(run, at - first_token, end - first_token), layout, at)
        found.append(Segment(at, end - at, codec.id, memoryview(fresh)))
    return found


def join(segments: Sequence[Segment], first_token: int) -> bytes:
    """Write the payload of a run that begins at ``first_token``."""
    head = [_COUNT.pack(len(segments))]
    for x in segments:
        name = x.codec_id.encode("ascii")
        head.append(_ENTRY.pack(x.first - first_token, x.num_tokens, len(x.payload), name))
    return b"".join([*head, *(x.payload for x in segments)])


def split(payload: memoryview, first_token: int, num_tokens: int) -> list[Segment]:
    """Read the segments of a run; their payloads are views, which no codec has checked yet.

    Raises:
        Corrupt: it is not in the form that ``join`` writes for this number of tokens.
    """
    if len(payload) < _COUNT.size:
        raise Corrupt("segments without a head")
    (count,) = _COUNT.unpack_from(payload)
    at = overhead_bytes(count)
    if not 0 < count <= num_tokens or at > len(payload):
        raise Corrupt(f"{count} segments of {num_tokens} tokens")
    found = []
    for i in range(count):
        first, size, length, name = _ENTRY.unpack_from(payload, overhead_bytes(i))
        if length > len(payload) - at:
            raise Corrupt("a segment is longer than what holds it")
        codec_id = name.rstrip(b"\0").decode("ascii", "replace")
        found.append(Segment(first_token + first, size, codec_id, payload[at : at + length]))
        at += length
    if at != len(payload):
        raise Corrupt("bytes after the last segment")
    return _in_order(found, first_token, num_tokens)


def _in_order(segments: Sequence[Segment], first: int, num_tokens: int) -> list[Segment]:
    """Cut each segment where the next one begins; raise ``Corrupt`` if they leave a hole."""
    ends = [*(x.first for x in segments[1:]), first + num_tokens]
    for segment, begin, end in zip(segments, [first, *ends], ends, strict=False):
        if not (segment.first == begin < end <= segment.end):
            raise Corrupt("segments leave a hole or are out of order")
    return [segment.cut(end) for segment, end in zip(segments, ends, strict=True)]


def check_length(segment: Segment, least: Least) -> None:
    """Raise ``Corrupt`` if a segment claims more tokens than its bytes can hold."""
    if len(segment.payload) < least(segment):
        raise Corrupt("a segment is too short for its tokens")


def fill(
    segments: Iterable[Segment],
    layout: KVLayout,
    first: int,
    out: KVRun,
    by: Unpack,
    least: Least,
) -> None:
    """Fill ``out`` with the tokens from ``first`` on, from segments without a hole.

    ``by`` raises ``Corrupt`` for a payload that its codec did not write.
    """
    end = first + (out[0][0].shape[1] if len(out) else 0)
    for segment in segments:
        begin, stop = max(segment.first, first), min(segment.end, end)
        if begin >= stop:
            continue
        check_length(segment, least)
        target = slice_tokens(out, begin - first, stop - first)
        if stop - begin == segment.num_tokens:
            by(segment, target)
            continue
        whole = layout.empty(segment.num_tokens)
        by(segment, whole)
        copy_run(slice_tokens(whole, begin - segment.first, stop - segment.first), target)


def cover(segments: Sequence[Segment], start: int, end: int) -> list[Segment]:
    """Find segments that follow each other without a hole from token ``start`` on.

    Goes as far as such segments exist. Of several that begin at the same token the longest is
    taken. Segments from ``end`` on are ignored.
    """
    found: list[Segment] = []
    at = start
    while at < end:
        fits = [
            x for x in segments if (x.first <= at < x.end if not found else x.first == at < x.end)
        ]
        if not fits:
            return found
        found.append(max(fits, key=lambda x: x.end))
        at = found[-1].end
    return found


def copy_run(source: KVRun, target: KVRun) -> None:
    """Copy a run into arrays of the same shapes."""
    for (from_k, from_v), (to_k, to_v) in zip(source, target, strict=True):
        to_k[...] = from_k
        to_v[...] = from_v
