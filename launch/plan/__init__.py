"""Predicts from a model's config.json alone what its sessions take and which codec will serve it.

``launch/families`` turns config.json into a shape of caches; from that ``hot_budget.py`` counts
live KV and ``cold_size.py`` packed KV; ``capacity_plan.py`` puts them together for
``thermocline plan``.
"""
