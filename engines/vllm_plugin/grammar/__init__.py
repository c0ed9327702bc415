"""Bounds what grammars cost vLLM: tried in a process that can be ended, then compiled lazily.

In the API server ``wanted`` reads from a request which grammars vLLM would compile for it, and
``gate`` has them tried by another process (``program``) before vLLM sees the request. In EngineCore
``backend`` compiles JSON schemas and patterns with llguidance, the rest with xgrammar.
"""
