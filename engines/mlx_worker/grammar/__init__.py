"""Holds answers to a grammar: JSON, a JSON schema, or calls of given functions.

The walk: ``host.grammar.source`` (the text of the grammar) -> ``compiler`` (whose turn it is, and
which grammars are known) -> ``host.grammar.trial`` (compiles it in a process that can be ended) ->
``host.grammar.matchers`` (compiles it here, once that is known to be little work) -> ``grammar``
(decides which tokens may come next).
"""
