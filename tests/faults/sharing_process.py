"""An engine that goes on with sessions which others go on with as well, until it is killed.

    python -m tests.faults.sharing_process URL SEED

It prints "session tokens" when a save is safe on the server. Its turns differ from those of a
process with another seed after the first ``SHARED`` tokens.
"""

from __future__ import annotations

import random
import sys

from kvstore.store.cold_store import ColdStore
from kvstore.tiers.redis_server.redis_tier import RedisTier
from tests.kv_sessions import begin_save, open_store, ram, ref, tokens

SESSIONS = ("0", "1")
SHARED = 100
LONGEST = 496  # whole chunks
DEADLINE_S = 2.0


def open_sharing(url: str) -> ColdStore:
    return open_store([ram(), RedisTier(url, deadline_s=DEADLINE_S)])


def history(session: str, num_tokens: int, seed: int) -> list[int]:
    own = tokens(LONGEST, 100 * seed + int(session))
    return [*tokens(SHARED, int(session)), *own][:num_tokens]


def main(url: str, seed: int) -> None:
    store = open_sharing(url)
    choose = random.Random(seed)
    length = dict.fromkeys(SESSIONS, 0)
    while True:
        name = choose.choice(SESSIONS)
        length[name] = length[name] % LONGEST + choose.randrange(1, 90)
        turn = history(name, length[name], seed)
        begin_save(store, ref(name), turn)
        if store.flush(30):
            print(name, length[name], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
