"""Learned presets that are entropy-coded (``balanced``, ``max``, ``safe``).

Reading order: ``closed_loop`` defines packing and restoring in whole numbers, ``loop_learning``
learns these, ``loop_checks`` checks them when a profile is opened, ``one_step`` are the presets,
``fused_loop`` packs and restores in one pass each, by the kernels' ``loop_tables``.
"""
