"""The cold stores: ``token_store`` (mlx), ``block_store`` (vLLM), and the nouns that both have.

A session is a chain of spans of its tokens, each of them one blob. At a turn's end ``saving`` packs
the blobs that no tier has, or the engine's side does; ``reviser`` makes the record, and the ledger
commits. On a return, ``planner`` finds the blobs of a prompt; ``restorer`` reads, verifies and
unpacks them, or ``block_reader`` reads and verifies them, and the engine's side unpacks.
"""
