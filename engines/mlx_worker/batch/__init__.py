"""Continuous batching on the owner thread: admission, prefill, decode, end.

``batch_loop`` runs them round after round: ``admission`` (in order, within the memory budget) ->
``prefix_reuse`` -> ``prefill`` -> ``batches`` (decode) -> ``request`` (end, and keeping the KV).
"""
