"""Files of the disk tier for tests of their faults: written, damaged and looked at."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from kvstore.tiers.disk_tier import DiskTier

MB = 1 << 20


def fill(folder: Path, count: int = 12, length: int = 150_000) -> dict[bytes, bytes]:
    """Open, write, close cleanly."""
    blobs = {b"c%032d" % i: random.Random(i).randbytes(length) for i in range(count)}
    tier = DiskTier(folder, 64 * MB)
    assert tier.put_many(list(blobs.items())) == count
    tier.close()
    return blobs


def nothing_left(folder: Path) -> bool:
    """A damaged file is gone."""
    usual = {"data.mdb", "lock.mdb", "owner.lock", "closed"}
    return {x.name for x in folder.iterdir()} <= usual


def check_usable(folder: Path, blobs: dict[bytes, bytes]) -> int:
    """The tier opens, gives back right blobs or none, and takes new ones; how many old ones."""
    tier = DiskTier(folder, 64 * MB)
    found = dict(zip(blobs, tier.get_many(list(blobs)), strict=True))
    assert all(blob in (None, blobs[key]) for key, blob in found.items())
    assert tier.put_many([(b"new", b"blob")]) == 1
    assert tier.get_many([b"new"]) == [b"blob"]
    tier.delete_many([b"new"])
    tier.close()
    return sum(blob is not None for blob in found.values())


def flip_in_file(folder: Path, name: bytes, offset: int) -> None:
    """Flip a bit ``offset`` bytes after the start of every occurrence of ``name``."""
    content = (folder / "data.mdb").read_bytes()
    place = content.find(name)
    assert place > 0
    with (folder / "data.mdb").open("r+b") as file:
        while place >= 0:
            file.seek(place + offset)
            file.write(bytes([content[place + offset] ^ 1]))
            place = content.find(name, place + 1)


def run_in_background(code: str, *arguments: str) -> None:
    """Run a program to its end, in a process of its own, which it may end early."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}:\n{done.stderr[-2000:]}"
