"""What one API key may take: requests and tokens per minute, requests at once.

``key_limits.py`` lets requests in by key, ``bucket.py`` counts one kind of thing per minute.
"""
