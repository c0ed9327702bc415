"""A process that saves turns until it is killed: ``python saving_process.py FOLDER SEED [CODECS]``.

Prints "session tokens" when a save is said to be safe. The third word says which ``CODECS`` it has:
``raw``, or ``both``, a lossy one for memory and another for the disk.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kvstore.blobs.codec_set import CodecSet
from tests.kv_sessions import disk, kv_of, open_store, ram, ref, tokens
from tests.worn_codec import WornCodec

BOTH = CodecSet(WornCodec("fast.1", 1), WornCodec("dense.1", 16), WornCodec("dense.1", 16))


def main(folder: Path, seed: int, codecs: str = "raw") -> None:
    store = open_store([ram(), disk(folder)], codecs=BOTH if codecs == "both" else None)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
