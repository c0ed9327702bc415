"""Measures the loss of each codec on the model that is served, and learns profiles for it.

``survey.py`` runs a measurement: ``learn.py`` makes a profile from the texts of ``corpus.py``, and
``measuring/`` measures its loss. An engine takes part by implementing ``instrument.py``. ``gate/``
then decides which codecs may serve. A measurement runs in a process of its own (``program.py``,
ordered by ``messages.py``), or in an engine that serves, while it is idle (``self_measurement.py``;
``unfinished.py`` keeps partial results over restarts).
"""
