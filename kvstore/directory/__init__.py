"""The directory: which sessions the servers on one Redis have. A belief; its loss costs recompute.

Each server writes only its own keys and reads the keys of all others, so no write can undo another
one and no lock is needed:

1. ``rows``: pages of a tenant's sessions at one server, sealed with the tenant's key.
2. ``board``: the short, frequent report of one server to all others: that it is alive, deletions,
   its orders to other servers, and its answers to theirs.
3. ``deletions``: every deletion that a server knows, as keyed hashes with epochs.
4. ``names``: the names of the keys, and the seals of their values.
5. ``exchange``: reads and writes all of these on the Redis server.
"""
