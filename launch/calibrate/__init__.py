"""Has a model measured by an engine that is started for it: ``thermocline calibrate``.

``orders.py`` plans measurements, ``program.py`` runs the engine; ``profile_notes.py`` finds the
result again, and ``profile_watch.py`` has engines adopt it. The measuring itself is in
``engines/calibration``; engines that serve do it by themselves, without any of this.
"""
