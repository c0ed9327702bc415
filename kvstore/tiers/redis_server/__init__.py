"""The Redis tier: blobs on a Redis or Valkey server that several engines may share.

``redis_tier`` implements ``Tier`` and keeps the budget; ``blobs`` writes, reads and removes whole
blobs; ``fragments`` names and checks their entries; ``link`` talks to the server within a deadline,
or to the ``primaries`` of a cluster (``servers``), and stops calls to one that does not answer.
With ``book`` one budget holds over an engine's lives.
"""
