"""Learned presets that are entropy-coded (``balanced``, ``max``, ``safe``).

Reading order: ``closed_loop`` defines packing and restoring in whole numbers, ``loop_learning``
learns these, ``one_step`` has the presets and checks learned arrays, ``fused_loop`` packs in one
pass and restores in another.
"""
