"""Anthropic's endpoints: messages, and counting their tokens.

The walk: ``request`` (what a body may hold) -> ``conversation`` (its messages as a chat's) ->
``translation`` (the whole request, with its tools, for the engine) -> the engine -> ``message`` (a
whole answer) or ``events`` (a streamed one), with ``usage``. ``messages`` has the routes.
"""
