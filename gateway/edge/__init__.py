"""The edge to the network: connections, bodies and keys within bounds of number, bytes and time.

``gateway/server.py`` gives uvicorn the protocol of ``protocol.py``, which counts a request's bytes
and asks ``connections.py`` for a place.

``bodies.py`` bounds the bytes of all bodies together, and unpacks and parses them.
``key_limits.py`` applies the limits of keys, and lists each route's cost. ``rates.py`` counts what
keys use in a minute, over all gateways of a Redis. ``key_list.py`` reads and changes the lines of
keys. ``tier_bytes.py`` makes each engine limit the bytes of a tenant in each tier.
"""
