"""Measures on the model itself what a codec costs, and learns what a calibrated codec needs.

``messages.py`` -> ``program.py`` (the process) -> ``survey.py``, which has ``learn.py`` make a
profile from ``corpus.py`` and ``measuring/`` judge it; ``instrument.py`` is what an engine has to
offer for that. ``gate/`` decides afterwards which codec may serve. Runs inside an engine's own
process, off the serving path: in a program of its own, or on a thread of an engine that serves
(``self_measurement.py``, which keeps what is ``unfinished.py``).
"""
