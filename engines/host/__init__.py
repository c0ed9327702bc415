"""What the engine processes of ours have in common.

``control_server`` answers the gateway's verbs, and ``lifeline`` ends a process with its gateway;
``weights`` names a model by its files. Of prompts: ``template_rules``, ``control_tokens``,
``segment_cache`` (pieces that were tokenized before); ``work_line`` bounds what waits.
Of answers: ``grammar``, which ``grammar_trial`` compiles first in a process that can be ended.
"""
