"""The edge to the network: connections and requests within bounds of number, bytes and time.

``server.py`` gives uvicorn the protocol of ``protocol.py``, which asks ``connections.py`` for a
place, counts by ``request_bounds.py``, and ends connections as ``closing.py`` says.
``body_budget.py`` bounds what all bodies take together.
"""
