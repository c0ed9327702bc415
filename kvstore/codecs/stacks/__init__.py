"""Codecs made of stages, which run one after the other, or fused in one pass.

``stack_shape`` turns a run into matrices, ``pipeline`` defines each kind of stage and runs them in
order, ``stack_codec`` is the codec, and ``fused`` has the common parts of fused packers.
"""
