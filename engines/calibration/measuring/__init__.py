"""Measures how far a model's answers drift when its past went through a codec.

``cases.py`` -> ``prefixes.py`` (prefill) -> ``trials.py`` (pack and unpack)
-> ``metrics.py`` -> ``tally.py``; ``measure.py`` is the loop over all of them.
"""
