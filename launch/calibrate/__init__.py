"""Has a model measured by an engine that is started for it: ``thermocline calibrate``.

``program.py`` plans measurements, runs the engine, and has serving ones adopt the result, which
``profile_notes.py`` finds again. The measuring itself is in ``engines/calibration``;
engines that serve do it by themselves, without any of this.
"""
