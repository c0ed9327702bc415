"""Turns generated tokens into what a client is shown: text, tool calls, chunks, events.

The walk: ``request_plan`` -> ``reply`` (events of all choices) -> ``output_processor`` (text, stop
strings, ``tool_calls``) -> ``reply_format`` (OpenAI's objects, ``logprobs``) -> ``sse``
(the stream).
"""
