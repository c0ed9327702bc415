"""Shows a server's present work in a terminal, from the events that it streams.

``view.py`` is the known state, ``frame.py`` its look; ``program.py`` reads the stream and the
keyboard, and puts them together.
"""
