"""Continuous batching on the owner thread: admission, prefill, decode, end.

The walk, which ``batch_loop`` makes round after round: ``fair_queue`` -> ``admission`` (within
the budget of ``batches``) -> ``prefix_reuse`` -> ``prefill`` -> ``batches`` (decode) ->
``request`` (the end, and the KV that is kept).
"""
