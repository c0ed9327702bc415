"""POST /v1/responses: OpenAI's second dialect, and its stored responses.

A request's walk: ``response`` checks its fields, ``history`` finds the past that it continues,
``translation`` makes a chat of it, with ``items`` and ``gateway.openai.chat_fields``; its answer
becomes ``output`` items, in a response object or as events.
"""
