"""Anthropic's endpoints: messages, and counting their tokens.

The walk: ``request`` (what a body may hold, and its messages as a chat's) -> ``translation`` (the
whole request, with its tools, for the engine) -> the engine -> ``message`` (a whole answer) or
``events`` (a streamed one). ``routes`` has the routes.
"""
