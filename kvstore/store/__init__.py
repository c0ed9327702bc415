"""The cold stores: ``token_store`` (mlx), ``block_store`` (vLLM), and the nouns that both have.

A session is a chain of spans of its tokens, each of them one blob. At a turn's end ``saver`` takes
it from the ``save_queue`` and has ``encoder`` pack the blobs that no tier has, or the engine's side
does; ``records`` makes the record, and the ledger commits. On a return, ``planner`` finds the blobs
of a prompt, and ``restorer`` reads and verifies them; it also unpacks them, or the engine's side
does.
"""
