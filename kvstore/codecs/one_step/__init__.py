"""Learned presets that are entropy-coded (``balanced``, ``max``, ``safe``).

Reading order: ``spectrum`` and ``prediction_design`` learn, ``step_integers`` derives small
integers and checks them when a profile is opened, ``one_step`` packs and restores
stage by stage, ``fused_steps`` in one pass each.
"""
