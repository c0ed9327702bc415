"""Prompts that begin as the one before: what keeps them so, and where they do not.

``inline_system`` writes messages so that a template takes them without moving any;
``kept_reasoning`` has it write what the model thought earlier; ``outline`` is a request as hashes
of its parts; ``prefix_watch`` compares a session's requests by them, and ``beside`` finds what is
no part of a conversation; ``twins`` serves a request once that comes again while it is served.
"""
