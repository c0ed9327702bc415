"""JSON schemas of answers and calls: their limits, and the keywords that no compiler supports.

``schema_count`` limits their size. ``well_formed`` removes malformed parts, ``enforceable`` writes
the rest for a compiler, and ``keywords`` names the removed keywords, or refuses a strict schema
that has any. ``refs``, ``one_of``, ``numbers`` and ``patterns`` handle parts of schemas.
``xgrammar_keywords`` has xgrammar's peculiarities, and ``vllm_check`` those of vLLM's own check.
"""
