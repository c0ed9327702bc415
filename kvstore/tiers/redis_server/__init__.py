"""The Redis tier: blobs on a Redis or Valkey server that several engines may share.

``redis_tier`` implements ``Tier`` with one value for each blob. ``link`` runs its commands within a
deadline, and stops calls to a server that does not answer. ``client`` opens redis-py's client of a
server, of the master that Sentinels name, or of a cluster, and reads how it bounds its memory.
"""
