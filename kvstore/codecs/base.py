"""The interface between the store and a codec, and the codec that keeps every byte."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from kvstore.errors import Corrupt, UnknownCodec
from kvstore.shapes import KVLayout, KVRun, slice_tokens, tokens_in

Payload: TypeAlias = bytes | memoryview

# The first tokens of a session, which every codec stores unquantised (16 bits per value): attention
# gives them far more weight than any other token.
NUM_SINKS: Final = 4
# The most bytes of payloads that are unpacked together. With few layers, the calls for a chunk
# would take longer than the chunk itself.
_MOST_JOINED: Final = 1 << 18


@runtime_checkable
class Codec(Protocol):
    """Packs a run of tokens of all layers into one payload, and unpacks it.

    A codec is stateless and thread-safe: the store calls it from several threads at once.
    Encoding the same run twice gives the same bytes: on every machine and every backend for a row
    codec, on one machine where the transform is a matrix product. Every machine can decode the
    payloads of every other.
    """

    @property
    def id(self) -> str:
        """The codec's name and arithmetic version, such as ``tq3.2``.

        It is in every blob's header, so that a reader finds the codec. A calibrated codec appends
        digits of a digest of what it learned: ``max.1-0123456789``.
        """

    @property
    def exact(self) -> bool:
        """True only if ``decode(encode(x))`` equals ``x`` bit for bit."""

    def check(self, layout: KVLayout) -> None:
        """Check that this layout can be encoded.

        Raises:
            UnknownCodec: it cannot be encoded; the message is one sentence with the reason.
        """

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        """Return the bytes of the payload; an estimate if the codec has an entropy coder.

        A payload is longer only if some rows have to be stored unquantised.
        """

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        """Return a lower bound of the length of any payload of ``num_tokens`` tokens, in bytes.

        The layout may come from a forged header. So this only computes; it allocates and compiles
        nothing.

        Raises:
            UnknownCodec: the codec does not support this layout.
        """

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> Payload:
        """Pack ``run``, which begins with token ``first_token`` of the session.

        ``run``: K (num_kv_heads, num_tokens, head_dim) and V (num_kv_heads, num_tokens, value_dim)
        of each layer, in the numpy dtype of ``layout``. The arrays are only read, and no reference
        is kept. The payload belongs to the caller alone.
        """

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        """Unpack all tokens of a run into ``out``.

        ``out`` holds views of the caller's arrays, in the form that ``encode`` takes.

        Raises:
            Corrupt: the payload does not have the length or structure that ``out`` requires.
                ``out`` may then hold any values and must not be used.
        """


@runtime_checkable
class ChunksCodec(Codec, Protocol):
    """A codec that unpacks consecutive chunks faster together than one by one."""

    def decode_chunks(
        self, payloads: Sequence[memoryview], layout: KVLayout, first_token: int, out: KVRun
    ) -> None:
        """Unpack the payloads of consecutive chunks; see ``decode_each`` for the arguments."""


_MEMBERS = ("id", "exact", "check", "packed_nbytes", "least_nbytes", "encode", "decode")


def as_codec(codec: object, called: str) -> Codec:
    """Return ``codec`` if it is a codec. Raises ``UnknownCodec``, which names missing members.

    ``called``: how the message names the object.
    """
    if isinstance(codec, str | type):
        hint = f"an object of it, {codec.__name__}()," if isinstance(codec, type) else "an object"
        raise UnknownCodec(f"{called} is {codec!r}, which is no codec: {hint} is wanted")
    if not isinstance(codec, Codec):
        missing = ", ".join(x for x in _MEMBERS if not hasattr(codec, x))
        raise UnknownCodec(
            f"{called} is a {type(codec).__name__}, which is no codec: it has no {missing}"
            " (kvstore.codecs.base.Codec says what these do; thermocline.simple takes a pair)"
        )
    return codec


def num_sinks(num_tokens: int, first_token: int) -> int:
    """Return how many of ``num_tokens`` tokens from ``first_token`` on are sinks."""
    return min(max(NUM_SINKS - first_token, 0), num_tokens)


def decode_each(
    codec: Codec, payloads: Sequence[memoryview], layout: KVLayout, first_token: int, out: KVRun
) -> None:
    """Unpack the payloads of consecutive chunks, one by one, with ``Codec.decode``.

    All chunks have the same number of tokens, together those of ``out``, and none has sinks.
    """
    size = tokens_in(out) // len(payloads)
    for number, payload in enumerate(payloads):
        begin = number * size
        rows = slice_tokens(out, begin, begin + size)
        codec.decode(payload, layout, first_token + begin, rows)


def check_claim(
    codec: Codec, layout: KVLayout, num_tokens: int, first_token: int, nbytes: int
) -> None:
    """Check that a payload of ``nbytes`` can hold what its header claims.

    Every reader of packed bytes calls it before anything is allocated or built for the layout.

    Raises:
        Corrupt: the payload is too short, or the codec does not support the layout.
    """
    try:
        least = codec.least_nbytes(layout, num_tokens, first_token)
    except UnknownCodec as error:
        raise Corrupt(f"packed rows of another layout: {error}") from error
    if nbytes < least:
        raise Corrupt(f"{nbytes} bytes are fewer than {num_tokens} tokens take")


def check_run(run: KVRun, layout: KVLayout) -> int:
    """Return the number of tokens in ``run``.

    Raises:
        ValueError: shapes or dtype differ from the layout's: a defect in the caller.
    """
    num_tokens: int = run[0][0].shape[1] if run else 0
    # Compare whole lists at once: a chunk that takes a millisecond may have a hundred arrays.
    shapes, expected = [(k.shape, v.shape) for k, v in run], _shapes(layout, num_tokens)
    if shapes != expected:
        raise ValueError(f"K and V of {shapes} where the layout has {expected}")
    dtypes = {array.dtype for pair in run for array in pair}
    if dtypes - {layout.numpy_dtype}:
        raise ValueError(f"dtypes {dtypes} where the layout has {layout.numpy_dtype}")
    return num_tokens


@functools.lru_cache(maxsize=64)
def _shapes(layout: KVLayout, num_tokens: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [
        ((x.num_kv_heads, num_tokens, x.head_dim), (x.num_kv_heads, num_tokens, x.value_dim))
        for x in layout.layers
    ]


@dataclass(frozen=True)
class RawCodec:
    """``raw``: keeps every byte as the engine has it; the only codec that promises equal tokens.

    A payload has K, then V of each layer, each (num_kv_heads, num_tokens, dim).
    """

    id: str = "raw.1"
    exact: bool = True

    def check(self, layout: KVLayout) -> None:
        """Accept any layout."""

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return layout.bytes_per_token * num_tokens

    def least_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        return self.packed_nbytes(layout, num_tokens, first_token)

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> bytes:
        check_run(run, layout)
        return b"".join(np.ascontiguousarray(array).data for pair in run for array in pair)

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        self._check_lengths([payload], layout, check_run(out, layout), first_token)
        _copy_rows(payload, out)

    def decode_chunks(
        self, payloads: Sequence[memoryview], layout: KVLayout, first_token: int, out: KVRun
    ) -> None:
        size = check_run(out, layout) // len(payloads)
        self._check_lengths(payloads, layout, size, first_token)
        step = max(1, _MOST_JOINED // max(1, len(payloads[0])))
        for first in range(0, len(payloads), step):
            few = payloads[first : first + step]
            rows = slice_tokens(out, first * size, (first + len(few)) * size)
            if len(few) == 1:
                _copy_rows(few[0], rows)
            else:
                _spread(np.frombuffer(b"".join(few), np.uint8).reshape(len(few), -1), rows)

    def _check_lengths(
        self, payloads: Sequence[memoryview], layout: KVLayout, num_tokens: int, first_token: int
    ) -> None:
        expected = self.packed_nbytes(layout, num_tokens, first_token)
        if wrong := {*map(len, payloads)} - {expected}:
            raise Corrupt(f"payload of {wrong.pop()} bytes, {expected} expected")


def _copy_rows(payload: memoryview, out: KVRun) -> None:
    at, view = 0, np.frombuffer(payload, np.uint8)
    for pair in out:
        for array in pair:
            end = at + array.nbytes
            array[:] = view[at:end].view(array.dtype).reshape(array.shape)
            at = end


def _spread(payloads: np.ndarray, out: KVRun) -> None:
    """Copy the rows of payloads, uint8 (num_chunks, nbytes), to their places."""
    at, count = 0, len(payloads)
    for array in (x for pair in out for x in pair):
        num_heads, num_tokens, dim = array.shape
        shape = num_heads, num_tokens // count, dim
        end = at + array.nbytes // count
        rows = payloads[:, at:end].view(array.dtype).reshape(count, *shape)
        # A view, since it only splits an axis.
        array.reshape(num_heads, count, *shape[1:])[:] = rows.swapaxes(0, 1)
        at = end
