"""A method made of two functions: a quantiser and its inverse.

payload: for each layer K, then V (num_kv_heads x num_tokens rows each): the first tokens of a
session in 16 bits | each array that ``quantise`` returned for the other rows, with codes packed to
``bits`` bits and floats as they are
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from kvstore.codecs.base import NUM_SINKS, Payload, check_run
from kvstore.codecs.catalogue import LITERATURE, OWN
from kvstore.codecs.floats import from_stored, narrow, to_stored, widen
from kvstore.codecs.names import FAMILIES
from kvstore.codecs.reader import Reader
from kvstore.codecs.registration import MOST_ID
from kvstore.errors import UnknownCodec
from kvstore.shapes import KVLayout, KVRun
from thermocline.method import Method

# fp32 rows (num_rows, dim) -> arrays whose first axis is the rows, and back.
Quantise: TypeAlias = Callable[[Any], Any]
Dequantise: TypeAlias = Callable[..., Any]
MOST_BITS: Final = 16
MOST_DIM: Final = 8192
ID: Final = "simple"
DIGITS: Final = 12  # of a digest, in an id
SIZES: Final = (2**-6, 1, 2**6)  # scales of the rows that are quantised to make a digest
_AN_ID: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MOST_ID - 1}}}", re.ASCII)


def simple(
    quantise: Quantise, dequantise: Dequantise, *, bits: int, torch: bool = False, id: str = ""
) -> Method:
    """Make a method of two functions; it can be measured, plotted and served as any other.

        def quantise(rows):                     # fp32 (num_rows, dim)
            scale = abs(rows).max(1, keepdims=True) / 7 + 1e-9
            return (rows / scale).round() + 7, scale.astype("float16")

        def dequantise(codes, scale):
            return (codes - 7) * scale

        method = thermocline.simple(quantise, dequantise, bits=4)

    The first axis of each array is the rows, since each row is quantised by itself. The first
    array, and every other array of integers, holds codes from 0 to ``2 ** bits - 1``, which are
    packed to ``bits`` bits. Other arrays of floats are stored as they are. To serve the method:
    ``register("mine", lambda: method.codec)``.

    Args:
        quantise: takes rows, returns an array or a tuple of arrays.
        dequantise: takes these arrays (codes as fp32), returns rows.
        bits: the bits of a code.
        torch: the functions take and return tensors of PyTorch.
        id: identifies the arithmetic, at most 24 letters, digits, ".", "_" and "-". Change it with
            the arithmetic: stored sessions are restored by the method that has their id. "" = a
            digest of rows of three scales that went through both functions; functions that return
            the same for these rows get the same id.

    Raises:
        ValueError: ``bits`` is not 1 to 16, the functions' arguments or results do not fit, or
            ``id`` is malformed or taken by one of Thermocline's methods.
    """
    for name, function in (("quantise", quantise), ("dequantise", dequantise)):
        if not callable(function):
            raise ValueError(f"{name} is {function!r}; a function is wanted")
    if not isinstance(bits, int) or not 1 <= bits <= MOST_BITS:
        raise ValueError(f"bits={bits!r}; a whole number from 1 to {MOST_BITS} is wanted")
    _check_takes("quantise", quantise, 1, "one array, the rows")
    name = _checked_id(id) if id != "" else ""
    codec = SimpleCodec(name, bits, quantise, dequantise, torch)
    rows = _usual_rows(3, 64)
    arrays = codec.quantised(rows)
    words = f"the {len(arrays)} array{'s' * (len(arrays) > 1)} that quantise returned"
    _check_takes("dequantise", dequantise, len(arrays), words)
    codec.restored(arrays, rows.shape)
    return Method(codec if name else replace(codec, id=_id_of(codec)))


def _checked_id(id: str) -> str:
    """Return ``id``. Raises ``ValueError`` if a blob cannot hold it or it is already taken."""
    if not isinstance(id, str) or not _AN_ID.fullmatch(id):
        raise ValueError(
            f"id={id!r}; at most {MOST_ID} letters, digits, '.', '_' and '-' are wanted"
        )
    if (name := re.split("[.-]", id)[0]) in {*OWN, *LITERATURE, *FAMILIES}:
        raise ValueError(
            f"id={id!r} belongs to the method {name!r}, which packs other bytes; take another"
        )
    return id


def _usual_rows(num_rows: int, dim: int) -> np.ndarray:
    """Return normally distributed rows, the same in every call, fp32 (num_rows, dim)."""
    return np.random.default_rng(0).standard_normal((num_rows, dim)).astype(np.float32)


def _id_of(codec: SimpleCodec) -> str:
    """Return an id with a digest of the functions' results for rows of three scales."""
    seen = blake2b(f"{codec.bits}".encode(), digest_size=DIGITS // 2)
    for size in SIZES:
        rows = _usual_rows(64, 64) * np.float32(size)
        try:
            arrays = codec.quantised(rows)
            arrays.append(codec.restored(arrays, rows.shape))
        except ValueError:  # the functions do not take rows of this scale
            arrays = []
        for array in arrays:
            seen.update(f"{array.dtype.str} {array.shape}".encode() + array.tobytes())
    return f"{ID}-{seen.hexdigest()}"


def _check_takes(name: str, function: Callable[..., Any], num_arrays: int, words: str) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a function written in C may have no signature
        return
    try:
        signature.bind(*range(num_arrays))
    except TypeError as error:
        raise ValueError(f"{name}{signature} does not fit: it is given {words} ({error})") from None


class _Part(NamedTuple):
    """The shape and dtype of one array of ``quantise``, per row."""

    shape: tuple[int, ...]  # without the first axis
    dtype: str  # little-endian; "" = codes

    def nbytes(self, num_rows: int, bits: int) -> int:
        count = num_rows * int(np.prod(self.shape, dtype=int))
        return count * np.dtype(self.dtype).itemsize if self.dtype else -(-count * bits // 8)


@dataclass(frozen=True)
class SimpleCodec:
    """Packs rows with two functions. Implements ``kvstore.codecs.base.Codec``."""

    id: str
    bits: int
    quantise: Quantise = field(repr=False)
    dequantise: Dequantise = field(repr=False)
    torch: bool = False
    exact: bool = field(default=False, init=False)

    def check(self, layout: KVLayout) -> None:
        for dim in {x for layer in layout.layers for x in (layer.head_dim, layer.value_dim)}:
            if dim > MOST_DIM:
                raise UnknownCodec(f"codec {self.id} packs vectors of {MOST_DIM} values at most")
            if dim:
                self._parts(dim)

    def packed_nbytes(self, layout: KVLayout, num_tokens: int, first_token: int) -> int:
        self.check(layout)
        num_sinks = min(max(NUM_SINKS - first_token, 0), num_tokens)
        total = num_sinks * layout.elements_per_token * 2
        for layer in layout.layers:
            num_rows = layer.num_kv_heads * (num_tokens - num_sinks)
            for dim in filter(None, (layer.head_dim, layer.value_dim)):
                total += sum(x.nbytes(num_rows, self.bits) for x in self._parts(dim))
        return total

    least_nbytes = packed_nbytes

    def encode(self, run: KVRun, layout: KVLayout, first_token: int) -> Payload:
        num_tokens = check_run(run, layout)
        num_sinks = min(max(NUM_SINKS - first_token, 0), num_tokens)
        pieces: list[bytes] = []
        for array in (x for pair in run for x in pair if x.shape[2]):
            stored = to_stored(array, layout.dtype)
            pieces.append(np.ascontiguousarray(stored[:, :num_sinks]).tobytes())
            rows = widen(np.ascontiguousarray(stored[:, num_sinks:]), layout.dtype)
            if rows.size:
                pieces += self._packed(self.quantised(rows.reshape(-1, rows.shape[2])))
        return b"".join(pieces)

    def decode(self, payload: memoryview, layout: KVLayout, first_token: int, out: KVRun) -> None:
        num_tokens = check_run(out, layout)
        num_sinks = min(max(NUM_SINKS - first_token, 0), num_tokens)
        reader = Reader(payload)
        for array in (x for pair in out for x in pair if x.shape[2]):
            heads, _, dim = array.shape
            sinks = reader.take("<u2", heads, num_sinks, dim)
            array[:, :num_sinks] = from_stored(sinks, layout.dtype)
            shape = (heads * (num_tokens - num_sinks), dim)
            if not shape[0]:
                continue
            parts = [self._unpacked(reader, x, shape[0]) for x in self._parts(dim)]
            rows = self.restored(parts, shape).reshape(heads, num_tokens - num_sinks, dim)
            array[:, num_sinks:] = narrow(rows, layout.dtype)
        reader.expect_end()

    def quantised(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of ``quantise``: codes as uint16, other floats in their own dtype.

        ``rows``: fp32 (num_rows, dim). Raises ``ValueError`` for wrong shapes, and for codes that
        are out of range.
        """
        found = self.quantise(self._tensor(rows))
        arrays = [np.asarray(x) for x in (found if isinstance(found, tuple | list) else (found,))]
        if not arrays or any(not x.ndim or len(x) != len(rows) for x in arrays):
            shapes = [x.shape for x in arrays]
            raise ValueError(f"quantise returned {shapes}; arrays of {len(rows)} rows are wanted")
        return [self._checked(x, is_codes=not i) for i, x in enumerate(arrays)]

    def restored(self, arrays: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """Return the fp32 rows of ``dequantise``. Raises ``ValueError`` for a wrong shape."""
        given = [x.astype(np.float32) if x.dtype == np.uint16 else x for x in arrays]
        rows = np.asarray(self.dequantise(*map(self._tensor, given)), np.float32)
        if rows.shape != shape:
            raise ValueError(f"dequantise returned rows of {rows.shape}; {shape} are wanted")
        return rows

    def _tensor(self, array: np.ndarray) -> Any:
        if not self.torch:
            return array
        import torch

        return torch.from_numpy(np.require(array, requirements=["C", "W"]))

    def _checked(self, array: np.ndarray, *, is_codes: bool) -> np.ndarray:
        if not is_codes and array.dtype.kind == "f":
            return np.ascontiguousarray(array)
        least, most = (array.min(), array.max()) if array.size else (0, 0)
        if not (least >= 0 and most < 1 << self.bits and np.all(array == np.round(array))):
            raise ValueError(
                f"quantise returned codes from {least} to {most}; whole numbers from 0 to"
                f" {(1 << self.bits) - 1} are wanted, for bits={self.bits}"
            )
        return array.astype(np.uint16)

    def _parts(self, dim: int) -> tuple[_Part, ...]:
        return _parts_of(self, dim)

    def _packed(self, arrays: list[np.ndarray]) -> Iterator[bytes]:
        for array in arrays:
            if array.dtype != np.uint16:
                yield array.astype(array.dtype.newbyteorder("<")).tobytes()
                continue
            places = np.arange(self.bits, dtype=np.uint16)
            bits = (array.reshape(-1, 1) >> places) & np.uint16(1)
            yield np.packbits(bits.astype(np.uint8), bitorder="little").tobytes()

    def _unpacked(self, reader: Reader, part: _Part, num_rows: int) -> np.ndarray:
        shape = (num_rows, *part.shape)
        if part.dtype:
            return reader.take(part.dtype, *shape)
        count = int(np.prod(shape))
        packed = reader.take("|u1", part.nbytes(num_rows, self.bits))
        bits = np.unpackbits(packed, count=count * self.bits, bitorder="little")
        places = np.uint16(1) << np.arange(self.bits, dtype=np.uint16)
        codes: np.ndarray = (bits.reshape(-1, self.bits) * places).sum(1, dtype=np.uint16)
        return codes.reshape(shape)


@functools.lru_cache(maxsize=64)
def _parts_of(codec: SimpleCodec, dim: int) -> tuple[_Part, ...]:
    """Return the shapes and dtypes of the arrays of ``quantise`` for rows of ``dim`` values.

    Raises ``UnknownCodec`` if it fails for such rows.
    """
    try:
        arrays = codec.quantised(_usual_rows(2, dim))
    except Exception as error:  # a user's own code
        raise UnknownCodec(f"codec {codec.id} takes no vectors of {dim} values: {error}") from error
    kinds = ["" if x.dtype == np.uint16 else x.dtype.newbyteorder("<").str for x in arrays]
    return tuple(_Part(x.shape[1:], kind) for x, kind in zip(arrays, kinds, strict=True))
