"""What one API key may take: requests and tokens per minute, requests at once.

``accounts.py`` says what each route takes of it and what bounds the rest of the route's work,
``key_limits.py`` lets requests in by key, ``bucket.py`` counts one kind of thing per minute.
"""
