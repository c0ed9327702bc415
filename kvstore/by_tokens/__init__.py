"""The cold store of an engine that matches prompts by token ids (mlx): ``store.ColdStore``.

At a turn's end, ``save_queue`` takes the job, ``saver`` works on it, ``encoder`` packs the blobs
that no tier has, ``reviser`` makes the record, and the ledger commits. On a return, ``matcher``
plans which tokens of a prompt can be restored; ``restorer`` reads, verifies and unpacks them.
"""
