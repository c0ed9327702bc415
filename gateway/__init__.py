"""The HTTP face: OpenAI's and Anthropic's dialects to clients, OpenAI's to engines; sees no KV.

The path of a request: ``edge/protocol`` receives it within bounds, ``request/middleware`` gives it
an id, ``request/callers`` authenticates it and charges its key, ``turns`` checks its body,
``identity`` finds its session, ``relay/turn_response`` admits it and sends it to the engine,
``relay/passthrough`` sends the bytes of the answer to the client.
"""
