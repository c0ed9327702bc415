"""Turns generated tokens into what a client is shown: text, tool calls, chunks, events.

The walk: ``reply`` (the plan, and events of all choices) -> ``output_processor`` (text, stop
strings, ``tool_calls``, log-probabilities) -> ``reply_format`` (OpenAI's objects, and the stream).
"""
