"""The directory: which sessions the servers on one Redis have. A belief; its loss costs recompute.

Each server writes keys of its own only, and all read those of the others, so no write can undo
another one and no lock is needed:

1. ``rows``: pages of a tenant's sessions at one server, sealed with the tenant's key.
2. ``board``: what one server says to all others, short and often: that it lives, what was deleted,
   what it asks of another server, and what it answers.
3. ``deletions``: every deletion that a server knows, as keyed hashes with epochs.
4. ``names``: the names of the keys, and the seals of what lies under them.
5. ``exchange``: reads and writes all of that on the Redis server.
"""
