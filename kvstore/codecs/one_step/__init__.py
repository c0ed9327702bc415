"""Learned presets that are entropy-coded (``balanced``, ``max``, ``safe``).

The walk: ``spectrum`` and ``prediction_design`` learn, ``step_design`` makes small integers of it,
``step_integers`` checks them when a profile is opened, ``one_step`` packs stage by stage and
``fused_steps`` restores in one pass.
"""
