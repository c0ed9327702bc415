"""Cold KV: how it is packed, where it rests, and which sessions there are.

Runs inside an engine's own process, next to the blocks. numpy, numba and msgspec; no web code,
no tensor library. From the bottom to the top:

    codecs, tiers           KV as bytes; places where bytes rest (they do not know each other)
    blobs                   one blob: key, header, checksum, codec
    ledger                  sessions as ordered blob keys, and all that happens to them
    by_tokens, by_blocks    the two stores: ``ColdStore`` (mlx), ``BlockStore`` (vLLM)
"""
