"""Learned presets that are entropy-coded (``balanced``, ``max``, ``safe``).

Reading order: ``closed_loop`` defines packing and restoring in whole numbers, ``loop_learning``
learns these, ``one_step`` are the presets and the checks of learned arrays, ``fused_loop`` packs
and restores in one pass each.
"""
