"""A disk tier's life under ``strace``, which lets its k-th call of the system fail, or kills it.

``python -m tests.faults.failing_calls FOLDER`` is that life. It prints a line for each step that
came to its end, and goes on where one is refused, as an engine does.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import TierUnavailable
from kvstore.tiers.disk_tier import DiskTier

ROOT = Path(__file__).parents[2]
BUDGET = 64 << 20
RECORD = b"r" + b"0" * 32
BLOBS = {b"c%032d" % i: bytes([i + 1]) * 20_000 for i in range(8)}
FIRST, THEN, LATE = (list(BLOBS.items())[a:b] for a, b in ((0, 3), (3, 6), (6, 8)))
GONE = FIRST[-1][0]  # deleted before the end; no other continues it
OLD, NEW = b"old" * 2000, b"new" * 2500
NO_TIER = 3  # exit status: the folder could not be used

# All calls that find a file, or change one.
CALLS = (
    *("openat", "mkdir", "flock", "fcntl", "ftruncate", "mmap", "write", "pwrite64", "writev"),
    *("pwritev", "fsync", "fdatasync", "rename", "unlink", "unlinkat"),
)
FILES = ("", "data.mdb", "lock.mdb", "closed", "owner.lock")


@dataclass(frozen=True)
class Life:
    """The end of a life: how it ended, the steps that it finished, and whether a fault came."""

    returncode: int
    steps: tuple[str, ...]
    injected: bool
    words: str


def live(folder: Path, call: str, fault: str, k: int) -> Life:
    """Live under ``fault``, as strace names it, at the k-th ``call`` that meets ``folder``."""
    log = folder.parent / "calls.txt"
    command = ["strace", "-f", "-qq", "-o", str(log), f"--trace={call}"]
    command += [f"--trace-path={folder / name}" for name in FILES]
    command += [f"--inject={call}:{fault}:when={k}"]
    command += [sys.executable, "-m", "tests.faults.failing_calls", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    calls = log.read_text(errors="replace")
    injected = "(INJECTED)" in calls or "+++ killed by" in calls
    return Life(done.returncode, tuple(done.stdout.split()), injected, done.stderr[-2000:])


def main(folder: Path) -> None:
    try:
        tier = DiskTier(folder, BUDGET)
    except TierUnavailable as error:
        print(error, file=sys.stderr)
        sys.exit(NO_TIER)

    def put(name: str, items: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            kept = tier.put_many(items)
        except TierUnavailable:
            kept = 0
        if kept == len(items):
            print(name, flush=True)

    def replace(name: str, blob: bytes) -> None:
        try:
            kept = tier.replace(RECORD, blob)
        except TierUnavailable:
            kept = False
        if kept:
            print(name, flush=True)

    put("first", FIRST)
    replace("old", OLD)
    put("then", THEN)
    replace("new", NEW)
    try:
        tier.delete_many([GONE])
        print("gone", flush=True)
    except TierUnavailable:
        pass
    put("late", LATE)
    check(tier)
    tier.close()
    print("closed", flush=True)


def check(tier: DiskTier) -> dict[bytes, bytes]:
    """Fail unless each blob is the one that was written, or none; returns those that are there."""
    keys = [*BLOBS, RECORD]
    try:
        found = tier.get_many(keys)
    except TierUnavailable:
        return {}
    there = {key: bytes(blob) for key, blob in zip(keys, found, strict=True) if blob is not None}
    for key, blob in there.items():
        assert blob in ((OLD, NEW) if key == RECORD else (BLOBS[key],)), key
    return there


if __name__ == "__main__":
    main(Path(sys.argv[1]))
