"""The manifest of a folder of generated files: sizes and hashes, checked at every start.

Hashing a quarter of a gigabyte takes about a second, so a file that was found right is hashed again
only when its size or modification time has changed. The times lie in a file of their own: losing
it costs one more hashing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

MANIFEST = "manifest.json"
SEEN = ".verified.json"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nbytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``source`` names, by hash and converter version, what the files were made from."""

    source: str
    files: dict[str, FileEntry]


class Damaged(Exception):
    """The folder differs from its manifest. The message names the file and the reason."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, source: str) -> None:
    """Write the manifest of the files that are in ``folder`` now."""
    files = {
        path.name: FileEntry(path.stat().st_size, sha256_of(path))
        for path in sorted(folder.iterdir())
    }
    manifest = msgspec.json.encode(Manifest(source, files))
    (folder / MANIFEST).write_bytes(msgspec.json.format(manifest))


def verify(folder: Path, source: str) -> None:
    """Check that ``folder`` holds exactly what was once made from ``source``.

    Raises:
        Damaged: it does not; the files must not be used.
    """
    manifest = _read_manifest(folder)
    if manifest.source != source:
        raise Damaged("it was made from another source, or by another version")
    seen = _read_seen(folder)
    times = {name: _verify_file(folder, name, manifest, seen) for name in manifest.files}
    if times != seen:
        _write_seen(folder, times)


def _verify_file(folder: Path, name: str, manifest: Manifest, seen: dict[str, int]) -> int:
    """Check one file and return its modification time. Raises ``Damaged``."""
    expected = manifest.files[name]
    path = folder / name
    try:
        status = path.stat()
        if status.st_size != expected.nbytes:
            raise Damaged(f"{name} has {status.st_size} bytes instead of {expected.nbytes}")
        if seen.get(name) != status.st_mtime_ns and sha256_of(path) != expected.sha256:
            raise Damaged(f"{name} has another content than the one that was written")
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error.strerror}") from error
    return status.st_mtime_ns


def _read_manifest(folder: Path) -> Manifest:
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise Damaged(f"{MANIFEST} is missing or unreadable") from error


def _read_seen(folder: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode((folder / SEEN).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.DecodeError):
        return {}


def _write_seen(folder: Path, times: dict[str, int]) -> None:
    temporary = folder / f"{SEEN}.{os.getpid()}"
    # A folder that another user owns and we may only read is hashed at every start instead.
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(times))
        temporary.replace(folder / SEEN)
