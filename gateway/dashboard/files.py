"""The page's files in memory, each as it is and packed by gzip, under one name for all of them.

That name is a hash of everything: a file's address changes whenever any file does, so browsers may
keep what they have for ever, and never mix two versions.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
PLACEHOLDER: Final = b"ui/VERSION/"  # in the index, the folder of everything else
# There, too: or a browser would find each module only when it has read the one that imports it.
PRELOADS: Final = b"<!-- MODULES -->"
_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}


class PageFile(NamedTuple):
    """A file as browsers get it."""

    kind: str
    plain: bytes
    packed: bytes  # by gzip
    tag: str  # ETag, with its quotes


class PageFiles(NamedTuple):
    """All files of one version of the page."""

    version: str
    page: PageFile  # the index
    others: Mapping[str, PageFile]  # by path below the version


@cache
def page_files(folder: Path = FOLDER) -> PageFiles:
    """Read the page; it does not change while the server runs."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in _KINDS
    }
    whole = hashlib.sha256()
    for name, content in found.items():
        whole.update(f"{name} {len(content)} ".encode() + content)
    version = whole.hexdigest()[:16]
    scripts = sorted((x for x in found if x.endswith(".js")), key=_needed_first)
    modules = [f'<link rel="modulepreload" href="ui/VERSION/{x}">' for x in scripts]
    index = found.pop(INDEX).replace(PRELOADS, "\n".join(modules).encode())
    index = index.replace(PLACEHOLDER, f"ui/{version}/".encode())
    others = {name: _file(name, content) for name, content in found.items()}
    return PageFiles(version, _file(INDEX, index), others)


def _needed_first(name: str) -> tuple[bool, str]:
    """Sort the scripts that ask for the data before those that show it."""
    return not name.startswith(("live/", "vendor/signals", "vendor/preact")), name


def _file(name: str, content: bytes) -> PageFile:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return PageFile(_KINDS[Path(name).suffix], content, gzip.compress(content, 9, mtime=0), tag)
