"""Stores responses, conversations and chat completions for clients that ask for it.

``stored`` gives the event loop its ``objects``, in steps, on threads that tenants take in turns.
These are sealed (``seal``) before they lie on a ``shelf``: ``sqlite_shelf`` or ``redis_shelf``,
which see no content. ``recall`` finds what requests go on from, and reads it once. Every lookup is
one tenant's.
"""
