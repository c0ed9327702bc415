"""Finds the other engines on the same Redis: each writes a sealed entry, and reads the others'.

``facts`` is an engine's description of itself, ``entry`` its sealed form, ``roster`` the places of
entries on the server, ``differences`` compares two engines, ``membership`` is the thread that keeps
an engine's own entry and reads the others.
"""
