"""Plans a checked request: chat template, tools, grammar, sampling and penalties.

The walk: ``request_planner`` -> ``tools`` (what the answer may call, and its ``grammar``) ->
``chat_template`` (token ids) -> ``sampling`` (how each answer chooses tokens).
"""
