"""Starts the server: builds it from settings, refuses what cannot work, runs it until a signal.

``run.py`` takes the port, has ``build.py`` wire everything after its checks
(``preflight.py``, and those that ``plan`` makes, too), and serves.
"""
