"""Limits of an API key: requests and tokens per minute, requests at once, bytes of tiers.

``accounts.py`` lists each route's share of the limits and the bound on the rest of its work,
``key_limits.py`` lets requests in by key, and counts what they use per minute.
``shared_limits.py`` has all gateways of a Redis let in no more than that together: ``stock.py`` is
the part that one of them has at hand, ``limit_scripts.py`` its questions to the server.
``tier_bytes.py`` has engines hold tenants to bytes of the tiers; ``byte_shares.py`` divides them.
"""
