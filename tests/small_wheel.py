"""Wheels of another distribution, made by hand."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

VERSION = "9.9"


def small_wheel(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """Write a wheel with these files, and return its path."""
    normal = name.replace("-", "_")
    own = f"{normal}-{VERSION}.dist-info"
    contents = {
        **files,
        f"{own}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n",
        f"{own}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{own}/RECORD"] = "".join(f"{x},{_hash(y)},{len(y)}\n" for x, y in contents.items())
    contents[f"{own}/RECORD"] += f"{own}/RECORD,,\n"
    path = folder / f"{normal}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in contents.items():
            archive.writestr(file, text)
    return path


def unpacked(folder: Path, name: str, files: Mapping[str, str]) -> Path:
    """Unpack such a wheel into a folder of its name, as an installer does."""
    target = folder / name
    with zipfile.ZipFile(small_wheel(folder, name, files)) as archive:
        archive.extractall(target)
    return target


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
