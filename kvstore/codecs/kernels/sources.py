"""A digest of all sources that compiled kernels may depend on.

numba checks only the file that contains a cached function. So the digest is a constant in every
cached function, and a change anywhere under ``kvstore/codecs`` compiles all of them again. Files
are read by path and never imported: a new or moved file cannot be forgotten, and kernels need not
import the modules that they only depend on.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def digest_of(root: Path) -> int:
    """Returns a 48-bit digest of the path and content of every ``*.py`` file under ``root``."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return int.from_bytes(digest.digest(), "big")


SOURCES: Final = digest_of(ROOT)
