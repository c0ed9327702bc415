"""Measures how far a model's answers drift when its past went through a codec.

``cases.py`` -> ``trials.py`` (prefill, pack and unpack) -> ``metrics.py``; ``measure.py`` is the
loop over all of them.
"""
