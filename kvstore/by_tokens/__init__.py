"""The cold store of an engine that matches prompts by token ids (mlx): ``store.ColdStore``.

A turn's end: ``save_queue`` takes the job, ``saver`` works on it, ``encoder`` packs what no tier
has, ``reviser`` makes the record, the ledger commits. A return: ``matcher`` plans what can be
restored of a prompt, ``restorer`` reads, verifies and unpacks it.
"""
