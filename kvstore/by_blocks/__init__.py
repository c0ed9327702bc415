"""The cold store of an engine that hashes its own blocks (vLLM): ``store.BlockStore``.

A turn's end: ``names`` says which blobs the chain of hashes has, the engine's side packs those that
are missing, ``reviser`` makes the record, the ledger commits. A return: ``reader`` plans, reads and
verifies; the engine's side unpacks into its blocks.
"""
