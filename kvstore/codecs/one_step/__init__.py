"""Learned presets that are entropy-coded (``balanced``, ``max``, ``safe``).

Reading order: ``spectrum`` and ``prediction_design`` learn, ``step_design`` derives small integers,
``step_integers`` checks them when a profile is opened, ``one_step`` packs stage by stage and
``fused_steps`` restores in one pass.
"""
