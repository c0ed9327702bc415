"""A digest of all sources that compiled kernels may depend on.

numba looks only at the file that a cached function stands in. So the digest enters every cached
function as a constant, and a change anywhere under ``kvstore/codecs`` compiles all of them anew.
Files are read by path and never imported: a file that is new or was moved cannot be forgotten, and
kernels need not import what they only depend on.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def digest_of(root: Path) -> int:
    """Returns 48 bits that stand for every ``*.py`` file under ``root``: its path and content."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return int.from_bytes(digest.digest(), "big")


SOURCES: Final = digest_of(ROOT)
