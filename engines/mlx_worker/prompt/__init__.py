"""Plans a checked request: chat template, tools, grammar, sampling and penalties.

A request passes ``request_planner`` -> ``tools`` (functions to offer, and the wanted grammar) ->
``chat_template`` (token ids) -> ``sampling`` (samplers and logits processors of each answer).
"""
