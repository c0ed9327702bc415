"""Prompts that begin as the one before: what keeps them so, and where they do not.

``inline_system`` writes messages so that a template takes them without moving any; ``outline`` is a
request as hashes of its parts; ``prefix_watch`` compares a session's requests by them; ``twins``
serves a request once that comes again while it is served.
"""
