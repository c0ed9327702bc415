"""The HTTP face: OpenAI in, OpenAI out; knows sessions by id only.

A request's walk: ``server`` reads its head, ``front`` gives it a request id and a bound,
``turns`` checks its body, ``identity`` finds its session, ``relay/turn_response`` admits it
and opens the engine, ``relay/passthrough`` sends the answer's bytes on.
"""
