"""Bounds what a grammar costs vLLM: a process that can be ended tries each grammar first.

In the API server ``wanted`` reads from a request which grammars vLLM would compile for it, and
``trial_gate`` lets another process (``program``) try them before vLLM sees the request. In
EngineCore ``backend`` compiles JSON schemas and patterns lazily with llguidance, and other grammars
with xgrammar.
"""
