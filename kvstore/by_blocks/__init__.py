"""The cold store of an engine that hashes its own blocks (vLLM): ``store.BlockStore``.

At a turn's end, ``names`` derives the blob names from the chain of hashes, the engine's side packs
the missing blobs, ``reviser`` makes the record, and the ledger commits. On a return, ``reader``
plans, reads and verifies; the engine's side unpacks into its blocks.
"""
