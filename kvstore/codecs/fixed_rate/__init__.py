"""Learned presets whose chunks all have one size (``dense3``).

Reading order: ``fixed_rate`` learns a KLT per unit and assembles the stages, ``rate_integers``
derives small integers from a KLT and checks them when a profile is opened, and ``fused_rate`` runs
all stages in one pass. ``rate_pipeline`` gives kernels on other devices the integers and the layout
of a payload.
"""
