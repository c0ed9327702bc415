"""The cold store: saves sessions as chains of full chunks, and restores them.

At a turn's end ``cold_store`` puts the engine's rows into ``save_queue``. ``saver`` packs the
chunks that no tier has, makes the record, and has the ledger write both. On a return ``planner``
finds the chunks of a prompt, ``blob_reader`` reads them, and ``restorer`` verifies and unpacks
them. ``states`` separates a state from its window rows and joins them again.
"""
