"""POST /v1/responses: OpenAI's second dialect, and its stored responses.

A request's walk: ``fields`` checks its body, ``history`` finds the past that it continues,
``items`` and ``gateway.openai.tools`` make a chat of it; its answer becomes ``output`` items, in a
``response`` object, as the events of ``event_stream`` or whole (``answer``).
"""
