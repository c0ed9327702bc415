"""A process that packs stored raw blobs again until it is killed.

    python -m tests.faults.packing_process FOLDER

Prints a line before each blob.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from kvstore.blobs.packer import RAW, StoreCodecs
from tests.kv_sessions import disk, open_store, ram
from tests.worn_codec import ThinCodec

THIN = StoreCodecs(ThinCodec("thin.1", 16), readable=(RAW,))


def main(folder: Path) -> None:
    def is_idle() -> bool:
        print("idle", flush=True)
        return True

    store = open_store([ram(), disk(folder)], codecs=THIN)
    store.pack_when(is_idle)
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
