"""A process that writes to a disk tier until it is killed: ``python -m tests.faults.disk_writer``.

Arguments: folder, budget in bytes, seed. After every call that returned, one line with its number.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvstore.tiers.disk_tier import DiskTier

BATCH = 6


def batch_keys(call: int) -> list[bytes]:
    return [b"c%030d%02d" % (call, i) for i in range(BATCH)]


def content(key: bytes) -> bytes:
    """Length and bytes follow from the key."""
    source = random.Random(key)
    return source.randbytes(64) * source.choice((20, 1500, 6000, 12_000))


def record(call: int) -> bytes:
    return b"record %d " % call * 2000


def main(folder: str, budget: str, seed: str) -> None:
    tier = DiskTier(Path(folder), int(budget))
    call = int(seed) * 1_000_000
    while True:
        call += 1
        keys = batch_keys(call)
        assert tier.put_many([(key, content(key)) for key in keys]) == BATCH
        assert tier.replace(b"r" + b"0" * 32, record(call))
        tier.touch(keys)
        if call % 5 == 0:
            tier.delete_many(batch_keys(call - 3))
        sys.stdout.write(f"{call}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
