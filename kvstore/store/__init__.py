"""The cold store: saves sessions as chains of full chunks, and restores them.

At a turn's end ``cold_store`` takes an engine's rows into the queue of ``saver``, which packs
the chunks that no tier has, makes the record, and lets the ledger write both. On a return
``planner`` finds the chunks of a prompt, ``blob_reader`` reads them, and ``restorer`` verifies and
unpacks them. ``states`` takes states apart and joins them.
"""
