"""Learned presets that are entropy-coded (``balanced``, ``max``, ``safe``).

Reading order: ``spectrum`` and ``prediction_design`` learn, ``step_integers`` derives small
integers and checks them when a profile is opened, ``one_step`` packs stage by stage and
``fused_steps`` restores in one pass.
"""
