"""Bounds the cost of grammars for vLLM: tried in a process that can be ended, then compiled lazily.

In the API server ``wanted`` reads from a request which grammars vLLM would compile for it, and
``trial_gate`` lets another process (``program``) try them before vLLM sees the request. In
EngineCore ``backend`` compiles JSON schemas and patterns with llguidance, other grammars with
xgrammar.
"""
