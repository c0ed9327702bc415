"""Shows a server's present work in a terminal, from the events that it streams.

``view.py`` is the known state, ``frame.py`` its look, ``reader.py`` reads the stream, ``keys.py``
the keyboard, and ``program.py`` puts them together.
"""
