"""Starts the server: checks the settings, builds its parts, and runs it until a signal.

``run.py`` takes the port, calls ``build.py``, which checks the settings (``preflight.py`` and
``launch.plan``) and wires everything, and serves.
"""
