"""POST /v1/responses: OpenAI's second dialect, and its stored responses.

The path of a request: ``response`` checks its fields, ``history`` reads the earlier items that it
continues, ``translation`` translates it into a chat, with ``items`` and
``gateway.openai.chat_fields``; the chat's answer becomes ``output`` items, in a response object or
as events.
"""
