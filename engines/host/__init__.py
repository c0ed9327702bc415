"""The parts that all of our engine processes share.

``control_server`` answers the gateway's verbs, ``lifeline`` ends a process with its gateway,
``weights`` identifies a model by its files, and ``work_line`` bounds the queues. Prompts go through
``template_rules``, ``control_tokens`` and ``segment_cache`` (which keeps tokenized pieces). Answers
may be held to a ``grammar``; ``grammar_trial`` first compiles it in a process that can be ended.
"""
