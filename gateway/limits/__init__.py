"""Limits of an API key: requests and tokens per minute, requests at once.

``accounts.py`` says what each route takes of it and what bounds the rest of the route's work,
``key_limits.py`` lets requests in by key, ``bucket.py`` counts one kind of thing per minute.
``shared_limits.py`` has all gateways of a Redis let in no more than that together: ``stock.py`` is
what one of them has at hand, ``limit_scripts.py`` what it asks the server.
"""
