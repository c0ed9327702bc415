"""A process that writes to Redis until it is killed: ``python redis_writer.py URL FOLDER SEED``.

Prints the key that it wrote last. Three of four blobs are new, the fourth replaces one; some of
them lie in one entry, others in several.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from kvstore.config import StoreConfig
from kvstore.tiers.base import Tier
from kvstore.tiers.redis_server.redis_tier import RedisTier
from kvstore.tiers.registry import open_tiers

BUDGET = 16 << 20
LENGTHS = (3_000, 90_000, 300_000, 700_000)


def open_far(url: str, folder: Path, capacity_bytes: int = BUDGET) -> Tier:
    """Open the Redis tier as an engine does whose folder this is."""
    config = StoreConfig(
        ram_bytes=0, disk_bytes=0, redis_url=url, redis_bytes=capacity_bytes, redis_deadline_s=10.0
    )
    (tier,) = open_tiers(config, folder)
    tier.pins_known()  # there are none
    return tier


def main(url: str, folder: Path, seed: int) -> None:
    tier = open_far(url, folder)
    choose = random.Random(seed)
    names = [b"r%032d" % i for i in range(4)]
    assert isinstance(tier, RedisTier)
    while not tier.knows_earlier_lives:  # soon; an engine has a model to load meanwhile
        time.sleep(0.01)
    while True:
        chain = [(choose.randbytes(33), choose.randbytes(choose.choice(LENGTHS))) for _ in range(3)]
        tier.put_many(chain, "alice")
        name = choose.choice(names)
        tier.replace(name, choose.randbytes(choose.choice(LENGTHS)), "alice")
        tier.touch([name, *(key for key, _ in chain)])
        print(chain[0][0].hex(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
