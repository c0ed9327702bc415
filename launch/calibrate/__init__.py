"""Starts an engine that measures a model: ``thermocline calibrate``.

``program.py`` makes the order, runs the engine, and lets serving engines adopt the new profile.
``profile_notes.py`` finds the profile of a model. The measuring itself is in
``engines/calibration``; serving engines also do it in idle moments, without this package.
"""
