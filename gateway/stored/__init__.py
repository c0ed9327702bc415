"""Stores responses, conversations and chat completions for clients that ask for it.

``stored`` runs operations on a tenant's ``objects`` in steps, on threads that tenants use in turns.
Objects are encrypted ``rows`` in a ``table``: ``sqlite_table`` or ``redis_table``, which cannot
read them. Pages that were read last stay in memory (``recent``). ``older`` converts files of
earlier releases.
"""
