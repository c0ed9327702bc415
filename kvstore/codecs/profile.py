"""The profile of one model, learned once: an immutable file, named by the model's fingerprint.

    "TCPF" | u32 length of the header | header, JSON | arrays | BLAKE2b-256 of everything before

The header has dtype, shape and order of every array; nothing in the file is ever executed. A
codec's id contains a digest of the arrays that this codec learned. So a blob is only ever read with
the profile with which it was written, and measuring quality again changes no id.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from kvstore.codecs.names import first_part
from kvstore.codecs.quality import Quality
from kvstore.errors import Corrupt, Mismatch
from kvstore.shapes import KVLayout, Rope

MAGIC: Final = b"TCPF"
VERSION: Final = 4
DIGEST_BYTES: Final = 32
MAX_HEADER_BYTES: Final = 1 << 22
MAX_BYTES: Final = 1 << 33
ALIGNMENT: Final = 64
UNFINISHED: Final = ".new"  # suffix of a file whose writer may have been killed
BLOCK_BYTES: Final = 1 << 20  # read at a time to compute a file's digest
DTYPES: Final = ("<f4", "<f2", "<i4", "<i2", "<u2", "|u1", "|i1")
ID_DIGITS: Final = 10  # of a digest, in a codec's id
OF_WINDOWS: Final = "@windows"  # appended to a preset's name: its arrays for layers with windows
OF_STATES: Final = "@states"  # in place of a preset's name: the costs of errors in states


# Fields of a profile that are also fields of its file's header.
_SHARED: Final = ("fingerprint", "layout", "ropes", "rows", "windows", "window_ropes")


class _ArrayEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array of the file: its name ``preset/array``, dtype and shape."""

    name: str  # preset/array
    dtype: str
    shape: tuple[int, ...]


class _Version(msgspec.Struct, frozen=True):
    """The version, which every release writes; msgspec skips the rest of the header."""

    version: int


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in the file except the arrays, as JSON."""

    version: int
    fingerprint: str
    layout: KVLayout
    ropes: tuple[Rope | None, ...]
    rows: tuple[Quality, ...]
    arrays: tuple[_ArrayEntry, ...]
    windows: KVLayout | None = None
    window_ropes: tuple[Rope | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Profile:
    """All arrays learned from one model, and the quality of codecs that were measured on it.

    ``learned``: for each preset its arrays by name, from ``calibrated.learn_profile``. ``rows``:
    the measured quality, also of presets that learn nothing.
    """

    fingerprint: str
    layout: KVLayout
    # One for each layer; None where keys have no RoPE. Empty if nothing was learned.
    ropes: tuple[Rope | None, ...]
    learned: Mapping[str, Mapping[str, np.ndarray]]
    rows: tuple[Quality, ...] = ()
    # The same for layers with sliding windows; their learned arrays are in ``learned`` under the
    # preset's name with ``OF_WINDOWS``.
    windows: KVLayout | None = None
    window_ropes: tuple[Rope | None, ...] = ()

    @functools.cached_property
    def ids(self) -> dict[str, str]:
        """The digits of each codec's id, by preset: a digest of its learned arrays."""
        return {preset: self._digest(preset) for preset in self.learned}

    def of_windows(self) -> Profile:
        """Return the profile of only the layers with windows, as if the model had no others."""
        learned = {
            name.removesuffix(OF_WINDOWS): arrays
            for name, arrays in self.learned.items()
            if name.endswith(OF_WINDOWS)
        }
        layout = self.windows or KVLayout(self.layout.dtype, ())
        return Profile(self.fingerprint, layout, self.window_ropes, learned)

    def only(self, preset: str) -> Profile:
        """Return a profile without other presets' arrays, whose memory can then be freed."""
        rows = tuple(x for x in self.rows if x.preset == preset)
        codec = first_part(preset)
        own = (codec, codec + OF_WINDOWS, OF_STATES)
        learned = {k: x for k, x in self.learned.items() if k in own}
        return replace(self, learned=learned, rows=rows)

    def in_memory(self) -> Profile:
        """Return the profile with copies of its arrays, which do not depend on its file."""
        learned = {
            name: {key: _copied(array) for key, array in arrays.items()}
            for name, arrays in self.learned.items()
        }
        return replace(self, learned=learned)

    def _digest(self, preset: str) -> str:
        known = msgspec.json.encode((self.layout.layers, self.ropes))
        digest = blake2b(known, digest_size=ID_DIGITS // 2)
        for name, array in sorted(self.learned[preset].items()):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def to_bytes(self) -> bytes:
        """Return the content of the profile's file."""
        return b"".join(self._blocks())

    def _blocks(self) -> Iterator[bytes | memoryview]:
        arrays = {f"{p}/{n}": a for p, known in self.learned.items() for n, a in known.items()}
        entries = tuple(_ArrayEntry(name, a.dtype.str, a.shape) for name, a in arrays.items())
        shared = {name: getattr(self, name) for name in _SHARED}
        header = _Header(version=VERSION, arrays=entries, **shared)
        digest = blake2b(digest_size=DIGEST_BYTES)
        for block in _file_blocks(msgspec.json.encode(header), list(arrays.values())):
            digest.update(block)
            yield block
        yield digest.digest()

    def save(self, path: Path) -> None:
        """Write the file completely under another name, then rename it.

        Raises:
            OSError: it cannot be written; no partial file is left.
        """
        whole = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
        try:
            with whole.open("wb") as file:
                for block in self._blocks():
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            whole.replace(path)
        finally:  # a partial file may take most of a full disk
            whole.unlink(missing_ok=True)


def load_profile(path: Path, *, mapped: bool = False) -> Profile:
    """Read a profile. Its arrays are read-only, each in memory of its own.

    ``mapped``: map the arrays from the file instead; they stay valid if the file is replaced.

    Raises:
        OSError: the file cannot be read.
        Corrupt: it is not a profile, or damaged.
        Mismatch: another release wrote it.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return _loaded(file, size, path, _mapped if mapped else _read)


def profile_in(content: bytes | bytearray | memoryview) -> Profile:
    """Read a profile from the content of its file; the arrays are copies.

    Raises:
        Corrupt: it is not a profile, or damaged.
        Mismatch: another release wrote it.
    """
    with BytesIO(content) as file:
        return _loaded(file, len(content), Path("a shared profile"), _copied_out)


def _loaded(file: _File, size: int, path: Path, take: _Take) -> Profile:
    if size > MAX_BYTES:
        raise Corrupt(f"{path}: larger than any profile")
    end = size - DIGEST_BYTES
    head = file.read(8)
    if end < 8 or head[:4] != MAGIC:
        raise Corrupt(f"{path}: not a profile")
    if not _is_whole(file, end):
        raise Corrupt(f"{path}: damaged; calibrate the model again")
    length = int.from_bytes(head[4:], "little")
    if length > min(MAX_HEADER_BYTES, end - 8):
        raise Corrupt(f"{path}: a header of {length} bytes is too long")
    file.seek(8)
    header = _header(file.read(length), path)
    span = (_aligned(8 + length), end)
    learned = _arrays(file, span, header.arrays, path, take)
    return Profile(learned=learned, **{name: getattr(header, name) for name in _SHARED})


def _is_whole(file: _File, end: int) -> bool:
    """Return whether the digest matches; read block by block, since a profile may be large."""
    digest, block = blake2b(digest_size=DIGEST_BYTES), memoryview(bytearray(BLOCK_BYTES))
    file.seek(0)
    for at in range(0, end, BLOCK_BYTES):
        part = block[: min(BLOCK_BYTES, end - at)]
        if file.readinto(part) != len(part):
            return False
        digest.update(part)
    return digest.digest() == file.read()


def _header(text: bytes, path: Path) -> _Header:
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise Mismatch(f"{path}: version {version}, {VERSION} expected; calibrate again")
        return msgspec.json.decode(text, type=_Header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Corrupt(f"{path}: {error}") from error  # a bad header may have a valid digest


_File: TypeAlias = BufferedReader | BytesIO
# Reads values from a file; arguments: file, dtype, byte offset, number of values.
_Take: TypeAlias = Callable[[Any, str, int, int], np.ndarray]


def _read(file: BufferedReader, dtype: str, at: int, count: int) -> np.ndarray:
    file.seek(at)
    return np.fromfile(file, dtype, count)


def _copied_out(file: BytesIO, dtype: str, at: int, count: int) -> np.ndarray:
    file.seek(at)
    return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype)


def _mapped(file: BufferedReader, dtype: str, at: int, count: int) -> np.ndarray:
    if not count:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file, dtype, "r", at, (count,)))


def _arrays(
    file: _File,
    span: tuple[int, int],
    entries: tuple[_ArrayEntry, ...],
    path: Path,
    take: _Take,
) -> dict[str, dict[str, np.ndarray]]:
    """Read the arrays, which extend in the file from ``span[0]`` to ``span[1]``."""
    learned: dict[str, dict[str, np.ndarray]] = {}
    at, last = span
    end = last if not entries else at
    for entry in entries:
        preset, _, name = entry.name.partition("/")
        if entry.dtype not in DTYPES or min(entry.shape, default=0) < 0:
            raise Corrupt(f"{path}: an array {entry.name} of {entry.dtype} {entry.shape}")
        count = math.prod(entry.shape)
        end = at + count * np.dtype(entry.dtype).itemsize
        # The declared size is compared with the file's before memory is allocated.
        values = take(file, entry.dtype, at, count if end <= last else 0)
        if end > last or len(values) != count:
            raise Corrupt(f"{path}: shorter than its arrays")
        try:
            array = values.reshape(entry.shape)
        except ValueError as error:  # more dimensions, or larger ones, than an array can have
            raise Corrupt(f"{path}: {error}") from error
        array.setflags(write=False)
        learned.setdefault(preset, {})[name] = array
        at = _aligned(end)
    if end != last:
        raise Corrupt(f"{path}: longer than its arrays")
    return learned


def _file_blocks(header: bytes, arrays: list[np.ndarray]) -> list[bytes | memoryview]:
    blocks: list[bytes | memoryview] = [MAGIC, len(header).to_bytes(4, "little"), header]
    at = 8 + len(header)
    for array in arrays:
        blocks.append(bytes(_aligned(at) - at))
        blocks.append(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        at = _aligned(at) + array.nbytes
    return blocks


def _copied(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.setflags(write=False)
    return copy


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


LARGEST_SIZE: Final = 2.0**20  # far above any row of unit size; sums of squares stay finite

# For each array, its dtype and the names of its axes.
ArraySpecs: TypeAlias = Mapping[str, tuple[str, tuple[str, ...]]]


def check_specs(
    arrays: Mapping[str, np.ndarray], specs: ArraySpecs, sizes: Mapping[str, int]
) -> None:
    """Check dtypes and shapes. Raises ``ValueError`` for the first array that differs.

    ``sizes``: the length of each axis, by the names in ``specs``.
    """
    for name, (dtype, axes) in specs.items():
        array, wanted = arrays[name], tuple(sizes[axis] for axis in axes)
        if array.dtype != np.dtype(dtype) or array.shape != wanted:
            found = f"{array.dtype} {array.shape}"
            raise ValueError(f"integers {name} are {found}, not {np.dtype(dtype)} {wanted}")


def check_ranges(ranges: Mapping[str, bool]) -> None:
    """Raises ``ValueError`` with the names of arrays whose values are not in their ranges.

    ``ranges``: for each array, whether its values are in range.
    """
    wrong = [name for name, good in ranges.items() if not good]
    if wrong:
        raise ValueError(f"integers out of range: {', '.join(wrong)}")


def length_of(array: np.ndarray, axis: int, ndim: int) -> int:
    """Return the length of an axis; 0 if the array does not have ``ndim`` axes."""
    return int(array.shape[axis]) if array.ndim == ndim else 0


def are_sizes(array: np.ndarray) -> bool:
    """Return whether all values are from 0 to ``LARGEST_SIZE``."""
    return bool(np.all((array >= 0) & (array <= LARGEST_SIZE)))  # a NaN fails both comparisons


def are_powers_of_two(array: np.ndarray) -> bool:
    """Return whether all values are powers of two: multiplying by them never rounds."""
    return are_sizes(array) and bool(np.all(np.frexp(array)[0] == 0.5))


def ascends(array: np.ndarray) -> bool:
    """Return whether no value is smaller than the one before it on the last axis."""
    return bool(np.all(array[..., 1:] >= array[..., :-1]))
