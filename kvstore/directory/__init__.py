"""The directory: which sessions the servers on one Redis have. A belief; its loss costs recompute.

Each server writes only its own keys and reads the keys of all others, so no write can undo another
one and no lock is needed:

1. ``entries``: pages of a tenant's sessions at one server, sealed with the tenant's key; every
   deletion that a server knows, as keyed hashes with epochs; the names of the keys.
2. ``boards``: the short, frequent report of each server to all others: that it is alive, deletions,
   its orders to other servers, and its answers to theirs.
3. ``exchange``: reads and writes all of these on the Redis server.
"""
