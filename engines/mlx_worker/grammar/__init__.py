"""Holds answers to a grammar: JSON, a JSON schema, or calls of given functions.

The walk: ``source`` (the text of the grammar) -> ``compiler`` (whose turn it is, and what is known)
-> ``trial`` (compiles it in a process that can be ended, ``program``) -> ``matchers`` (compiles it
here, once that is known to be little work) -> ``grammar`` (decides which tokens may come next).
"""
