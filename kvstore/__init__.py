"""Cold KV: how it is packed, where it is stored, and which sessions exist.

Runs inside an engine's own process, next to the blocks. Uses numpy, numba and msgspec; no web code,
no tensor library. From the bottom to the top:

    codecs, tiers           KV as bytes; places that store bytes (neither imports the other)
    blobs                   one blob: key, header, checksum, codec
    likeness                why a store cannot read the data on its Redis
    ledger                  sessions as ordered blob keys, and every operation on them
    store                   the store of one engine, ``ColdStore``
"""
