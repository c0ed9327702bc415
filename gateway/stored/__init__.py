"""What clients asked to be stored: responses, conversations and chat completions.

``shelf`` says what a place for them can do, ``sqlite_shelf`` and ``redis_shelf`` are two, and
``stored`` gives the event loop one of them, on a thread of its own. Every lookup is one tenant's.
``sealed_text`` is for what clients keep for us instead.
"""
