"""Measures how much a model's answers change if the KV before them was packed and unpacked.

For each of ``cases.py``, ``trials.py`` prefills, packs and unpacks a session, and ``metrics.py``
compares the answers. ``measure.py`` is the loop over cases and codecs.
"""
