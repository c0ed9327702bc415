"""A process that saves turns until it is killed: ``python saving_process.py FOLDER SEED [CODEC]``.

Prints "session tokens" when a save is said to be safe. The third word names its ``CODEC``: ``raw``,
or ``worn``; then it wakes each session before its turn, and goes on from restored rows.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvstore.blobs.packer import StoreCodecs
from tests.kv_sessions import CHUNK, begin_save, chain_of, disk, open_store, ram, ref, tokens
from tests.worn_codec import WornCodec

WORN = StoreCodecs(WornCodec("worn.1", 1))


def main(folder: Path, seed: int, codec: str = "raw") -> None:
    store = open_store([ram(), disk(folder)], codecs=WORN if codec == "worn" else None)
    lengths = {record.id: record.num_tokens for record in store.records()}
    choose = random.Random(seed)
    while True:
        name = str(choose.randrange(4))
        lengths[name] = lengths.get(name, 0) + choose.randrange(1, 120)
        history = tokens(lengths[name], int(name))
        restored = store.restore(store.match(ref(name), chain_of(store, ref(name), history)))
        begin_save(store, ref(name), history, restored)
        if choose.random() < 0.5:
            safe = {x: n for x, n in lengths.items() if n >= CHUNK}
            store.flush(30)
            for session, n in safe.items():
                print(session, n, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
