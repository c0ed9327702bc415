"""Continuous batching on the owner thread: admission, prefill, decode, end.

The walk, which ``batch_loop`` makes round after round: ``admission`` (in order, within
the budget of ``batches``) -> ``prefix_reuse`` -> ``prefill`` -> ``batches``
(decode) -> ``request`` (the end, and the KV that is kept).
"""
