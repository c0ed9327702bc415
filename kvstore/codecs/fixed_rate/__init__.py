"""Learned presets whose chunks all have one size (``dense3``).

The walk: ``axes`` learns a KLT per unit, ``integer_design`` makes small integers of it,
``rate_integers`` checks them when a profile is opened, ``fixed_rate`` packs stage by stage and
``fused_rate`` does the same in one pass. ``rate_pipeline`` and ``rate_payload`` give the integers
and the layout of a payload to kernels on other devices.
"""
