"""The edge to the network: connections, bodies and keys within bounds of number, bytes and time.

``server.py`` gives uvicorn the protocol of ``protocol.py``, which counts a request's bytes and
asks ``connections.py`` for a place.

``accounts.py`` lists each route's share of a key's limits and the bound on the rest of its work,
and bounds what all bodies take together; ``content_encodings.py`` unpacks those that came packed,
``half_characters.py`` mends those with half an emoji;
``key_limits.py`` lets requests in by key, and counts what they use per minute.
``shared_limits.py`` has all gateways of a Redis let in no more than that together; ``stock.py`` is
the part that one of them has at hand. ``key_list.py`` has the lines of keys; ``tier_bytes.py``
has each engine bound what a tenant holds of each tier.
"""
