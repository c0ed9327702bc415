"""Turns generated tokens into the replies that clients get: text, tool calls, chunks, events.

Tokens pass through ``reply`` (the plan, and events of all choices) -> ``output_processor`` (text,
stop strings, ``tool_calls``, log-probabilities) -> ``reply_format`` (OpenAI's objects, streams).
"""
