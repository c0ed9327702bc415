"""Shows in a terminal what a server does now, from the events that it streams.

``view.py`` is what is known, ``frame.py`` how it looks, ``reader.py`` reads the stream, ``keys.py``
the keyboard, and ``program.py`` puts them together.
"""
