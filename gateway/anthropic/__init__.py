"""Anthropic's endpoints: messages, and counting their tokens.

The path of a request: ``request`` (the fields of a body) -> ``translation`` (the whole request as
a chat's, its messages by ``conversation``) -> the engine -> ``message`` (a whole answer) or
``events`` (a streamed one). ``routes`` has the routes.
"""
