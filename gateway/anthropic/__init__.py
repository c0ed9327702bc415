"""Anthropic's endpoints: messages, and counting their tokens.

The walk: ``request`` (what a body may hold) -> ``conversation`` and ``tools`` (the same as a chat)
-> ``translation`` (the whole request, for the engine) -> the engine -> ``message`` (a whole answer)
or ``events`` (a streamed one), with ``usage``. ``messages`` has the routes.
"""
