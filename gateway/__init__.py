"""The HTTP face: OpenAI's and Anthropic's dialects to clients, OpenAI's to engines; sees no KV.

A request's way: ``edge/protocol`` receives it within bounds, ``request/middleware`` gives it an
id, ``request/callers`` finds its key and charges its cost, ``turns`` checks its body, ``identity``
finds its session, ``relay/turn_response`` admits it and opens the engine, ``relay/passthrough``
sends the answer's bytes on.
"""
