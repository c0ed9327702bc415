"""Measures the loss of each codec on the model that is served, and learns profiles for it.

``calibrate.py`` runs a measurement: ``learn.py`` makes a profile from the texts of ``corpus.py``,
and ``measuring/`` measures its loss. An engine takes part by implementing ``instrument.py``.
``gate/`` then decides which codecs may serve. A measurement runs in an engine's idle moments
(``self_measurement.py``), at a model's first start in several stages (``orders.py``), or by order
of ``thermocline calibrate``.
"""
