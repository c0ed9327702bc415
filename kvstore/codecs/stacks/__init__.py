"""Codecs made of stages: KV as stacks of rows, stages in order, and packers in one pass.

``stack_shape`` turns a run into matrices, ``pipeline`` defines each kind of stage and runs them in
order, ``stack_codec`` is the codec; ``fused`` is for packers that do all of it in one pass.
"""
