"""What codecs are made of: one piece per file.

Every piece works on a stack, fp32 (units, tokens, width), or on the codes made of one; see
``stacks``. Codes and components have the same logical shape, but lie in memory token by token, one
component after the other: coders walk along components.
"""
