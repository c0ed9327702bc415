"""One rank's cold store in each of vLLM's workers, and its copies between blocks and blobs.

``worker_side`` opens all of it: the store, under the model's ``fingerprint``; ``transfer``, which
saves and loads; ``rank``, which answers the scheduler side; ``resting_watch``, which reports the
tiers of sessions.
"""
