"""The edge to the network: connections, bodies and keys within bounds of number, bytes and time.

``gateway/server.py`` gives uvicorn the protocol of ``protocol.py``, which counts a request's bytes
and asks ``connections.py`` for a place.

``bodies.py`` bounds what all bodies take together, unpacks and parses them; ``key_limits.py`` lets
requests in by key, and lists each route's share of a key's limits and the bound on the rest of its
work; ``rates.py`` counts what they use in a minute, at all gateways of a Redis.
``key_list.py`` has the lines of keys; ``tier_bytes.py`` has each engine bound what a tenant holds
of each tier.
"""
