"""Digests of the full content of weight files.

A few kilobytes in a few tensors may be the only difference between two fine-tuned models, so a
sample is not enough. Reading all the files takes long (60 GB at the speed of the disk or the CPU),
so each is read once: its digest is saved beside the cold store, and stays valid while the file has
the same inode, size and times. If several processes start together, one reads and the others wait.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from engines.files import replace_file

logger = logging.getLogger(__name__)

CACHE_NAME: Final = "weight-digests.json"
# Each segment is hashed on its own, so that one large file keeps all processors busy.
SEGMENT_BYTES: Final = 16 << 20
MAX_THREADS: Final = 16
# A file changed less than this long ago may change again without a change of its times.
SETTLED_S: Final = 5.0
# Digests kept for files of other models; the latest stay.
MAX_ENTRIES: Final = 1024


class _Stamp(msgspec.Struct, frozen=True):
    """The state of a file; it changes with every write (ctime is included as mtime can be set)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class _FileDigest(msgspec.Struct, frozen=True):
    stamp: _Stamp
    digest: str


_Digests = dict[str, _FileDigest]
_decoder = msgspec.json.Decoder(_Digests)


def weight_digests(
    files: Sequence[Path], folder: Path | None, clock: Callable[[], float] = time.time
) -> list[bytes]:
    """Return the 32-byte digest of each file's content; reads only files with no saved digest.

    Args:
        folder: the folder in which digests are saved; None = they are not saved. If it is not
            writable, the files are read at every start.
        clock: returns seconds since the epoch.

    Raises:
        OSError: a file cannot be read.
    """
    with _locked(folder):
        known = _read(folder)
        entries = {str(x.resolve()): _entry(x, known) for x in files}
        now_ns = int((clock() - SETTLED_S) * 1e9)
        lasting = {name: x for name, x in entries.items() if x.stamp.ctime_ns < now_ns}
        if any(known.get(name) != x for name, x in lasting.items()):
            others = {name: x for name, x in known.items() if name not in entries}
            _write(folder, {**dict(list(others.items())[-MAX_ENTRIES:]), **lasting})
    return [bytes.fromhex(entries[str(x.resolve())].digest) for x in files]


def _entry(file: Path, known: Mapping[str, _FileDigest]) -> _FileDigest:
    entry, stamp = known.get(str(file.resolve())), _stamp(file)
    if entry is not None and entry.stamp == stamp:
        return entry
    return _FileDigest(stamp, content_digest(file, stamp.size).hex())


def content_digest(file: Path, size: int) -> bytes:
    """Return a 32-byte hash of a file's first ``size`` bytes: a hash of its segments' hashes.

    Raises:
        OSError: the file cannot be read.
    """
    whole = blake2b(size.to_bytes(8, "little"), digest_size=32)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS), "weights") as pool:
            starts = range(0, size, SEGMENT_BYTES)
            for digest in pool.map(lambda start: _segment_digest(descriptor, start), starts):
                whole.update(digest)
    finally:
        os.close(descriptor)
    return whole.digest()


def _segment_digest(descriptor: int, start: int) -> bytes:
    return blake2b(os.pread(descriptor, SEGMENT_BYTES, start), digest_size=32).digest()


def _stamp(file: Path) -> _Stamp:
    found = file.stat()
    return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


# ---- saved digests


@contextmanager
def _locked(folder: Path | None) -> Iterator[None]:
    """Hold a lock between processes, so that the ranks of a model read its weights only once."""
    try:
        if folder is not None:  # at the first start, no tier has made the folder yet
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = None if folder is None else (folder / f"{CACHE_NAME}.lock").open("w")
    except OSError:
        lock = None
    if lock is None:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(folder: Path | None) -> _Digests:
    if folder is None:
        return {}
    try:
        return _decoder.decode((folder / CACHE_NAME).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _write(folder: Path | None, entries: _Digests) -> None:
    if folder is None:
        return
    try:
        replace_file(folder / CACHE_NAME, msgspec.json.encode(entries))
    except OSError as error:
        logger.warning("the digests of weight files could not be saved: %s", error)
