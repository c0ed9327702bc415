"""Tries grammars out in a process that can be ended, before an engine compiles them.

``source`` writes the text of a grammar, ``trial`` has it compiled by another process (``program``),
and ``matchers`` compiles it with llguidance, there and in the engine.
"""
