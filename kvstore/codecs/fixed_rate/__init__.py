"""Learned presets whose chunks all have one size (``dense3``).

Reading order: ``axes`` learns a KLT per unit, ``integer_design`` derives small integers from it,
``rate_integers`` checks them when a profile is opened, ``fixed_rate`` packs stage by stage and
``fused_rate`` does the same in one pass. ``rate_pipeline`` and ``rate_payload`` provide the
integers, and the layout of a payload, for kernels on other devices.
"""
