"""A process that saves turns until it is killed: ``python saving_process.py FOLDER SEED``.

Prints "session tokens" when a save is said to be safe.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.kv_sessions import disk, kv_of, open_store, ram, ref, tokens


def main(folder: Path, seed: int) -> None:
    store = open_store([ram(), disk(folder)])
    lengths = {record.id: record.num_tokens for record in store.records()}
    choose = random.Random(seed)
    while True:
        name = str(choose.randrange(4))
        lengths[name] = lengths.get(name, 0) + choose.randrange(1, 120)
        history = tokens(lengths[name], int(name))
        store.save(ref(name), history, kv_of(history))
        if choose.random() < 0.5:
            safe = dict(lengths)
            store.flush(30)
            for session, n in safe.items():
                print(session, n, flush=True)


main(Path(sys.argv[1]), int(sys.argv[2]))
