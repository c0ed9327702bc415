"""Stores responses, conversations and chat completions for clients that ask for it.

``stored`` gives the event loop its ``objects``, in steps, on threads that tenants take in turns.
These are sealed (``seal``) before they lie in a ``table``: ``sqlite_table`` or ``redis_table``,
which see no content. Every lookup is one tenant's.
"""
