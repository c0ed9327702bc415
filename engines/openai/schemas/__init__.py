"""JSON schemas of answers and of calls: their bounds, and the keywords that no compiler knows.

``schema_count`` bounds them. ``well_formed`` leaves out values that are no schema, ``enforceable``
writes the rest for a compiler, and ``keywords`` names the keywords that were left out, or refuses
them where a schema is strict. Parts of schemas: ``refs``, ``one_of``, ``numbers``, ``patterns``.
Readers: ``xgrammar_keywords``, and ``vllm_check``, which vLLM makes before it compiles.
"""
