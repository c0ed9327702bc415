"""Stores responses, conversations and chat completions for clients that ask for it.

``stored`` gives the event loop a tenant's ``objects``, in steps, on threads that tenants take in
turns. They lie as sealed ``rows`` in a ``table``: ``sqlite_table`` or ``redis_table``, which see no
content; what was read last stays in memory (``recent``). ``older`` reads files of earlier releases.
"""
