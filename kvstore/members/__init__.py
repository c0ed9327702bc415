"""Finds the other engines on the same Redis: each writes a sealed entry, and reads the others'.

``facts`` is what an engine says of itself, ``entry`` how that is sealed, ``roster`` where entries
lie on the server, ``differences`` what is wrong between two, ``membership`` the thread that keeps
an engine's own entry and reads the others.
"""
